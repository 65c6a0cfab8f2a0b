"""What needles are hidden in: repeated noise, essays, or other needles."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from .sources import locate, read_text
from .words import Rng, Words

DEPTHS = tuple(int(d) for d in np.round(np.linspace(0, 100, 40)))  # per cent
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")


def value(rng: Rng, kind: str, words: Words) -> str:
    """A key or a value: `numbers` of seven digits, `words` (a pair), or `uuids`."""
    match kind:
        case "numbers":
            return str(int(rng.integers(10**6, 10**7)))
        case "uuids":
            return str(uuid.UUID(bytes=rng.bytes(16), version=4))
        case "words":
            return words.pair(rng)
        case _:
            raise ValueError(f"kind must be numbers, words or uuids, got {kind!r}")


def distinct(rng: Rng, kind: str, words: Words, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[value(rng, kind, words)] = None
    return list(found)


class Essay:
    """Running text, cut to a number of words."""

    def __init__(self, text: str) -> None:
        self._words = text.split()
        if not self._words:
            raise ValueError("essays: the text holds no words")

    @classmethod
    def load(cls, folder: Path | None) -> Essay:
        return cls(read_text(locate(folder, "essays")).replace("<|endoftext|>", " "))

    def sentences(self, count: int) -> list[str]:
        """The first `count` words (over again where the text is too short), as sentences."""
        words = self._words[:count]
        if len(words) < count:
            words = list(islice(cycle(self._words), count))
        return _SENTENCE.split(" ".join(words))


def insert_at_depths(
    rng: Rng, sentences: Sequence[str], needles: Sequence[str], depths: Sequence[int] | None
) -> str:
    """Sentences joined by blanks, each needle after int(len * depth / 100) of them.

    Without `depths` they are drawn from 40 evenly spaced ones, without replacement.
    """
    if depths is None:
        depths = sorted(rng.choice(DEPTHS, len(needles), replace=False).tolist())
    pieces: list[str] = []
    last = 0
    for depth, needle in zip(depths, needles, strict=True):
        at = len(sentences) * depth // 100
        pieces += [*sentences[last:at], needle]
        last = at
    return " ".join([*pieces, *sentences[last:]])


def insert_in_lines(
    rng: Rng, units: Sequence[str], needles: Sequence[str], depths: Sequence[int] | None
) -> str:
    """Units joined by newlines, needles in their order before distinct units drawn at random.

    `depths` in per cent fixes the places instead.
    """
    if depths is not None:
        places = [len(units) * depth // 100 for depth in depths]
    else:
        count = max(len(units), len(needles))
        places = sorted(rng.choice(count, len(needles), replace=False).tolist())
    lines: list[str] = []
    last = 0
    for place, needle in zip(places, needles, strict=True):
        lines += [*units[last:place], needle]
        last = place
    return "\n".join([*lines, *units[last:]])
