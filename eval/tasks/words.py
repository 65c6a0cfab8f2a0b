"""Word lists from which keys and lists are drawn.

The bundled lists are of this project (keys from the demo's wording, the pool from books in the
public domain). RULER draws from the package `wonderwords`: `wonderwords` as a name takes its lists,
which decide the items, so its version belongs to a result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jhybrid.config import require

Rng = np.random.Generator


@dataclass(frozen=True)
class Words:
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    pool: tuple[str, ...]

    def pair(self, rng: Rng) -> str:
        """adjective-noun, all pairs alike."""
        number = int(rng.integers(len(self.adjectives) * len(self.nouns)))
        return (
            f"{self.adjectives[number // len(self.nouns)]}-{self.nouns[number % len(self.nouns)]}"
        )


def load_words(name: str = "bundled") -> Words:
    """`bundled`, `wonderwords`, or a JSON file with adjectives, nouns and pool."""
    if name == "wonderwords":
        return _wonderwords()
    path = Path(__file__).with_name("words.json") if name == "bundled" else Path(name)
    require(path.is_file(), "words", name, "bundled, wonderwords or an existing JSON file")
    lists = json.loads(path.read_text(encoding="utf-8"))
    for part in ("adjectives", "nouns", "pool"):
        require(part in lists, f"{path}: {part}", None, "a list of words")
    return Words(*(tuple(lists[part]) for part in ("adjectives", "nouns", "pool")))


def _wonderwords() -> Words:
    from wonderwords import RandomWord  # pyright: ignore[reportMissingImports]

    # Its default lists, by their category.
    def category(part: str) -> list[str]:
        return sorted(RandomWord().parts_of_speech[part])

    nouns, adjectives, verbs = category("noun"), category("adjective"), category("verb")
    pool = sorted({*nouns, *adjectives, *verbs})
    return Words(tuple(adjectives), tuple(nouns), tuple(pool))
