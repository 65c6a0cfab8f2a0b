"""Tokenizers published as tiktoken ranks (`tiktoken.model`, Kimi) -> a `tokenizer.json`.

A rank file has a line `base64(token) rank` for each token. tiktoken cuts text with a pattern, takes
a piece that is a token whole, and else joins the two neighbours whose joined bytes have the lowest
rank until none are a token. A BPE with merges does the same if

* the merge of a token is the pair that is left when the token's own bytes are joined this way.
  Only that pair can ever meet in a text: what happens inside the bytes of a token does not depend
  on what is around them. Tokens that never come down to a pair have no merge;
* merges are ordered by the rank of what they make; and
* a piece that is a token is taken whole (`ignore_merges`).

Special tokens are those of `added_tokens_decoder` in tokenizer_config.json; ids that it leaves out
between them are reserved, so that every id is where the model has it.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from .byte_level import byte_letters

RANKS, FAST, CONFIG = "tiktoken.model", "tokenizer.json", "tokenizer_config.json"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def write_tokenizer(src: Path, dst: Path) -> bool:
    """Write `tokenizer.json` and its config into `dst` if `src` has ranks and no tokenizer.json.

    The config loses the code that the checkpoint would run for its tokenizer. Returns whether
    anything was written.
    """
    if not (src / RANKS).is_file() or (src / FAST).is_file():
        return False
    path = src / CONFIG
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    ranks = read_ranks(src / RANKS)
    tokenizer = build_tokenizer(ranks, added_tokens(config, len(ranks)))
    tokenizer.save(str(dst / FAST))
    config.pop("auto_map", None)
    config.pop("added_tokens_decoder", None)  # tokenizer.json has them, and the reserved ones
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (dst / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return True


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank. ValueError naming the line that is not one."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}: line {number}: expected `base64 rank` ({error})") from error
    if sorted(ranks.values()) != [*range(len(ranks))]:
        raise ValueError(f"{path}: expected ranks 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{path}: expected a token for each byte, missing {missing}")
    return ranks


def added_tokens(config: dict[str, Any], first: int) -> list[AddedToken]:
    """The tokens from id `first` on, in order, gaps filled."""
    entries = {int(i): entry for i, entry in config.get("added_tokens_decoder", {}).items()}
    inside = sorted(i for i in entries if i < first)
    if inside:
        raise ValueError(f"{CONFIG}: added tokens {inside} have ids of the {first} ranks")
    out = []
    for i in range(first, max(entries, default=first - 1) + 1):
        entry = entries.get(i, {"content": f"<|reserved_token_{i}|>"})
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word")}
        special = bool(entry.get("special", True))
        out.append(AddedToken(entry["content"], normalized=False, special=special, **flags))
    return out


def build_tokenizer(
    ranks: dict[bytes, int], added: list[AddedToken], pattern: str = KIMI_PATTERN
) -> Tokenizer:
    letters = byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (names[pair[0]], names[pair[1]])
        for token in sorted(ranks, key=ranks.__getitem__)
        if (pair := last_pair(token, ranks)) is not None
    ]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.add_tokens(added) != len(added):  # each keeps its own `special`
        raise ValueError(
            f"{CONFIG}: expected added tokens that differ from each other and the rest"
        )
    return tokenizer


def last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The pair that joining a token's bytes by rank leaves before the token itself."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = (a + b for a, b in zip(parts, parts[1:], strict=False))
        known = [(ranks[both], i) for i, both in enumerate(joined) if both in ranks]
        if not known:
            return None
        _, i = min(known)  # the leftmost of equals
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
