"""Converted rank files encode as tiktoken's algorithm does, which is written out here."""

from __future__ import annotations

import base64
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.writer import write_checkpoint
from jhybrid.engine.detokenizer import Detokenizer, TokenBytes
from jhybrid.tokenizer.tiktoken import build_tokenizer, last_pair, read_ranks
from tests.synthetic import TINY, write_hf

TEXTS = (
    "Hello world, it's 12345 o'clock! Isn't it?  \n\n Two  spaces\tand a tab ",
    "我们在2024年 said HELLO世界abc ÉTÉ été naïve Ünïcödé 😀👩‍👩‍👧 日本語かな",
    "aaaa aaab abababab bbbb" * 3,
    "\r\n  x = {'a': [1, 22, 333, 4444]}  # don't, WE'LL\n",
)
PIECES = " ?[^ ]+| +"  # a pattern that the standard library reads alike


def trained_ranks(size: int, seed: int) -> dict[bytes, int]:
    """Random merges, frequent in the texts or not at all, so that ranks follow no frequency."""
    rng = random.Random(seed)
    ranks = {bytes([byte]): byte for byte in rng.sample(range(256), 256)}
    ranks = {token: i for i, token in enumerate(ranks)}
    data = "".join(TEXTS).encode()
    while len(ranks) < size:
        if rng.random() < 0.5:  # two tokens joined
            token = rng.choice(list(ranks)) + rng.choice(list(ranks))
        else:  # any bytes of the texts: many of these no merge can reach
            start = rng.randrange(len(data))
            token = data[start : start + rng.randint(2, 6)]
        ranks.setdefault(token, len(ranks))
    return ranks


def encode(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken: a whole token, or the neighbours of lowest joint rank joined until none has one."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        best, where = None, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and (best is None or rank < best):
                best, where = rank, i
        if best is None:
            return [ranks[part] for part in parts]
        parts[where : where + 2] = [parts[where] + parts[where + 1]]


@pytest.mark.parametrize("seed", range(4))
def test_encodes_as_tiktoken_does(seed: int) -> None:

    ranks = trained_ranks(1500, seed)
    assert any(last_pair(token, ranks) is None for token in ranks if len(token) > 1)
    tokenizer = build_tokenizer(ranks, [], PIECES)
    rng = random.Random(seed)
    alphabet = "".join(TEXTS)
    texts = [*TEXTS, *("".join(rng.choices(alphabet, k=60)) for _ in range(200))]
    for text in texts:
        expected = [
            token for piece in re.findall(PIECES, text) for token in encode(piece.encode(), ranks)
        ]
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("我们在2024年", ["我们在", "202", "4", "年"]),
        ("HELLO世界abc", ["HELLO", "世界", "abc"]),
        ("it's WE'LL don't", ["it's", " WE'LL", " don't"]),
        ("a  b \n c", ["a", " ", " b", " \n", " c"]),
        ("x=1;\n\ny", ["x", "=", "1", ";\n\n", "y"]),
        ("HelloWorld été", ["Hello", "World", " été"]),
    ],
)
def test_kimi_pattern(text: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer({bytes([byte]): byte for byte in range(256)}, [])
    assert tokenizer.pre_tokenizer is not None
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


def write_ranks(folder: Path, ranks: dict[bytes, int]) -> None:
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer as Kimi's have it: ranks, a config, and code."""
    src = write_hf(tmp_path / "hf", TINY)
    write_ranks(src, trained_ranks(600, 0))

    def special(text: str, **flags: bool) -> dict[str, Any]:
        return {"content": text, "special": True, "lstrip": False, "rstrip": False} | flags

    config = {
        "added_tokens_decoder": {
            "600": special("[BOS]"),
            "601": special("[EOS]"),
            "602": special("<|im_end|>"),
            "605": special("<|tool|>", special=False),
            "610": special("[PAD]"),
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    (src / "tokenizer_config.json").write_text(json.dumps(config))
    return src


def test_written_when_converting(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(open_checkpoint(folder), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert len(tokenizer) == 611
    ids = tokenizer("[BOS]été 世界<|im_end|><|tool|>", add_special_tokens=False).input_ids
    assert ids[0] == 600 and ids[-2:] == [602, 605]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        600,
        601,
        610,
    )
    assert tokenizer.convert_ids_to_tokens(603) == "<|reserved_token_603|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "hi<|im_end|>"
    table = TokenBytes(tokenizer)
    assert table.special_ids >= {600, 601, 602, 603, 610} and 605 not in table.special_ids
    text = Detokenizer(table)
    assert "".join(map(text.push, ids)) + text.finish() == "été 世界<|tool|>"


def test_a_fast_tokenizer_is_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    write_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"YQ== x\n", r"tiktoken\.model: line 1: expected `base64 rank`"),
        (b"YQ==\n", "line 1: expected"),
        (b"!!! 3\n", "line 1: expected"),
        (b"YQ== 1\n", "expected ranks 0 to 0, each once"),
        (b"YQ== 0\n", r"expected a token for each byte, missing \[0, 1, "),
    ],
)
def test_bad_rank_files(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_ranks(tmp_path / "tiktoken.model")


def test_added_token_with_the_id_of_a_rank(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["5"] = {"content": "[BAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"added tokens \[5\] have ids of the 600 ranks"):
        write_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
