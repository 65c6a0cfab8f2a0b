"""RULER's aggregation tasks: common words of a list (cwe), frequent words of a code (fwe)."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

import numpy as np

from .problem import Draft
from .wording import Template
from .words import Rng, Words

ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class CommonWordsTask:
    common: int = 10
    max_tokens: int = 120
    scorer: str = "string_match_all"


@dataclass(frozen=True)
class Frequencies:
    """How often each common word stands in the list, and each other one.

    `example` is (words, often, seldom) of the solved example before it, None for no example.
    """

    often: int
    seldom: int
    example: tuple[int, int, int] | None


def frequency_levels(length: int) -> list[Frequencies]:
    """RULER's for that length first; smaller ones (ours) for tokenizers with few words a token."""
    small = [
        Frequencies(6, 1, (20, 3, 1)),
        Frequencies(6, 1, None),
        Frequencies(4, 1, None),
    ]
    return [Frequencies(30, 3, (40, 10, 3)), *small] if length >= 4096 else small


def common_words_draft(
    task: CommonWordsTask,
    units: int,
    index: int,
    seed: int,
    words: Words,
    wording: Template,
    level: Frequencies,
) -> Draft:
    """A list of `units` distinct words, the first ten drawn being the common ones."""
    rng = np.random.default_rng((seed, index))
    order = np.random.default_rng(seed)
    pool = [words.pool[i] for i in np.random.default_rng(seed).permutation(len(words.pool))]
    shown = ""
    named = {"count": task.common}
    question, prefix = wording.text("question", **named), wording.text("prefix", **named)
    if level.example is not None:
        count, often, seldom = level.example
        listed, answer = _word_list(rng, order, pool, count, task.common, often, seldom)
        shown = f"{wording.raw('instruction')}\n{listed}\n{question}{prefix}{answer[1]}\n\n"
    listed, (common, answer) = _word_list(
        rng, order, pool, units, task.common, level.often, level.seldom
    )
    return Draft(
        id=str(index),
        context=f"{shown}{wording.raw('instruction')}\n{listed}\n",
        question=question,
        answer_prefix=prefix,
        references=tuple(common),
        scorer=task.scorer,
        max_tokens=task.max_tokens,
        answer=answer,
        tags={"often": level.often, "seldom": level.seldom, "example": bool(level.example)},
    )


def _word_list(
    rng: Rng, order: Rng, pool: list[str], count: int, common: int, often: int, seldom: int
) -> tuple[str, tuple[list[str], str]]:
    """The printed list, and its common words with the answer as a numbered list.

    They are in the order in which they first occur: any order scores, and one that can be known
    keeps the likelihood of the answer a measure of recall.
    """
    if count > len(pool):
        raise ValueError(f"length: {count} distinct words are needed, the pool has {len(pool)}")
    chosen = [pool[i] for i in rng.choice(len(pool), count, replace=False)]
    many = chosen[:common] * often + chosen[common:] * seldom
    many = [many[i] for i in order.permutation(len(many))]
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(many, start=1))
    first = sorted(chosen[:common], key=many.index)
    answer = "".join(f" {i}. {word}" for i, word in enumerate(first, start=1))
    return listed, (first, answer)


@dataclass(frozen=True)
class FrequentWordsTask:
    alpha: float = 2.0
    answers: int = 3
    letters: int = 6
    max_tokens: int = 50
    scorer: str = "string_match_all"


def frequent_words_draft(
    task: FrequentWordsTask, units: int, index: int, seed: int, length: int, wording: Template
) -> Draft:
    """`units` words by a zeta law: rank k stands floor(units * k^-2 / zeta(2)) times; rank 1 is
    the noise, ranks 2 to 4 the answers."""
    rng = np.random.default_rng((seed, index))
    letters = list(string.ascii_lowercase)
    size = max((length - task.max_tokens) // 50, task.answers + 2)
    vocabulary: set[str] = set()
    while len(vocabulary) < size:
        vocabulary.add("".join(rng.choice(letters, task.letters)))
    ordered = sorted(vocabulary)
    ordered = [ordered[i] for i in np.random.default_rng(seed).permutation(size)]
    ordered[0] = "..."
    counts = [int(units * k**-task.alpha / ZETA_2) for k in range(1, size + 1)]
    text = [word for word, count in zip(ordered, counts, strict=True) for _ in range(count)]
    text = [text[i] for i in np.random.default_rng(seed).permutation(len(text))]
    answers = ordered[1 : task.answers + 1]
    return Draft(
        id=str(index),
        context=f"{wording.raw('instruction')}\n{' '.join(text)}\n",
        question=wording.raw("question"),
        answer_prefix=wording.raw("prefix"),
        references=tuple(answers),
        scorer=task.scorer,
        max_tokens=task.max_tokens,
        answer=f" {' '.join(answers)}",
    )
