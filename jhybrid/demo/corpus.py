"""The training text: plain-English books and short stories as one array of tokens each.

A corpus folder holds `fiction.txt`, `essays.txt` and `tinystories.txt` (or the same with `.xz`):
documents separated by a line `<|endoftext|>`. Essays, two books and the last 5 % of the stories
are held out: they are haystacks and yardsticks, never training text.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .tokenizer import END_OF_TEXT, encode
from .wording import Rng

SEPARATOR = "<|endoftext|>\n"
HELD_OUT_BOOKS = (19, 22)  # The Time Machine, Peter and Wendy
HELD_OUT_STORIES = 0.05


@dataclass(frozen=True)
class Text:
    """Documents joined by END_OF_TEXT, with the places where documents and sentences begin."""

    tokens: np.ndarray  # uint16 [N]
    documents: np.ndarray  # int64, first token of each document
    sentences: np.ndarray  # int64, first token of each sentence

    @classmethod
    def from_documents(cls, documents: list[str]) -> Text:
        if not documents:
            raise ValueError("a text needs at least one document")
        pieces = [np.append(encode(d.strip("\n")), np.uint16(END_OF_TEXT)) for d in documents]
        tokens = np.concatenate(pieces)
        starts = np.concatenate([[0], np.cumsum([len(p) for p in pieces])[:-1]])
        full_stop = np.isin(tokens[:-2], encode(".!?"))
        spaced = full_stop & np.isin(tokens[1:-1], encode(" \n"))
        upper = (tokens[2:] >= ord("A")) & (tokens[2:] <= ord("Z"))
        sentences = np.union1d(starts, np.flatnonzero(spaced & upper) + 2)
        return cls(tokens, starts, sentences)

    def slice(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from `start`, going on at the beginning when the text ends."""
        part = self.tokens[start : start + length]
        while len(part) < length:
            part = np.concatenate([part, self.tokens[: length - len(part)]])
        return part

    def window(self, rng: Rng, length: int) -> np.ndarray:
        """`length` tokens from the start of a random sentence."""
        return self.slice(int(self.sentences[int(rng.random() * len(self.sentences))]), length)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, without its separator."""
        start = int(self.documents[index])
        last = index + 1 == len(self.documents)
        stop = len(self.tokens) if last else int(self.documents[index + 1])
        return self.tokens[start : stop - 1]


@dataclass(frozen=True)
class Corpus:
    """Training text and what is held out of it."""

    fiction: Text
    stories: Text
    held_out_fiction: Text
    held_out_stories: Text
    essays: Text  # held out as a whole

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        folder = Path(folder)
        fiction = read_documents(folder, "fiction")
        stories = read_documents(folder, "tinystories")
        held_out = [b for i, b in enumerate(fiction) if i in HELD_OUT_BOOKS] or fiction[-1:]
        kept = max(1, round(len(stories) * (1 - HELD_OUT_STORIES)))
        return cls(
            fiction=Text.from_documents([b for b in fiction if b not in held_out] or fiction),
            stories=Text.from_documents(stories[:kept]),
            held_out_fiction=Text.from_documents(held_out),
            held_out_stories=Text.from_documents(stories[kept:] or stories[-1:]),
            essays=Text.from_documents(read_documents(folder, "essays")),
        )


def read_documents(folder: Path, name: str) -> list[str]:
    """The documents of `name`.txt or `name`.txt.xz. Raises FileNotFoundError naming both."""
    plain, packed = folder / f"{name}.txt", folder / f"{name}.txt.xz"
    if plain.is_file():
        text = plain.read_text(encoding="utf-8")
    elif packed.is_file():
        text = lzma.decompress(packed.read_bytes()).decode("utf-8")
    else:
        raise FileNotFoundError(f"the corpus needs {plain} or {packed}")
    return [d for d in (part.strip("\n") for part in text.split(SEPARATOR)) if d]
