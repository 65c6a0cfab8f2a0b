"""Prefixes on which static horizons are held against what the gates do (dasc appendix A.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jhybrid.config import require

from .problem import Encoder
from .sources import field, locate, read_records, read_text

CHARACTERS = 3.5  # a candidate has at least so many for each token wanted
CANDIDATES = 500
_SPEAKERS = {"human": "User", "user": "User", "gpt": "Assistant", "assistant": "Assistant"}


def sharegpt(
    folder: Path | None, encoder: Encoder, targets: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """`count` prefixes of each target length, longest first; no conversation is used twice.

    Of the first 500 conversations long enough in characters, the shortest with enough tokens
    (where they are too few, the longest there are), of which the last tokens are kept.
    """
    path = locate(folder, "sharegpt")
    texts = [_serialize(field(r, "conversations", path)) for r in read_records(path)]
    used: set[int] = set()
    out: list[tuple[int, ...]] = []
    for target in sorted(targets, reverse=True):
        enough = (n for n, t in enumerate(texts) if n not in used and len(t) >= CHARACTERS * target)
        candidates = [(n, encoder.ids(texts[n])) for n in islice(enough, CANDIDATES)]
        require(len(candidates) >= count, str(path), len(candidates), f"{count} long enough")
        long = sorted((c for c in candidates if len(c[1]) >= target), key=lambda c: len(c[1]))
        short = sorted((c for c in candidates if len(c[1]) < target), key=lambda c: -len(c[1]))
        for number, ids in [*long, *short][:count]:
            used.add(number)
            out.append(tuple(ids[-target:]))
    return out


def _serialize(turns: Sequence[Any]) -> str:
    """Alternating User: and Assistant: blocks; other speakers are left out."""
    known = [(_SPEAKERS[t["from"]], t["value"]) for t in turns if t["from"] in _SPEAKERS]
    return "\n".join(f"{speaker}: {text}" for speaker, text in known)


def essays(
    folder: Path | None, encoder: Encoder, targets: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """Without ShareGPT: pieces of the essays, one after the other."""
    ids = encoder.ids(read_text(locate(folder, "essays")).replace("<|endoftext|>", " "))
    needed = sum(targets) * count
    require(len(ids) >= needed, "essays", f"{len(ids)} tokens", f"at least {needed}")
    out, at = [], 0
    for target in sorted(targets, reverse=True):
        for _ in range(count):
            out.append(tuple(ids[at : at + target]))
            at += target
    return out
