"""RULER's variable tracking: one chain of assignments among noise; who holds the value?"""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np

from .haystacks import insert_in_lines
from .problem import Draft
from .wording import Template
from .words import Rng

EXAMPLE_VALUE = "12345"
EXAMPLE_LETTERS, LETTERS = 3, 5


@dataclass(frozen=True)
class TrackingTask:
    hops: int = 4
    max_tokens: int = 30
    scorer: str = "string_match_all"


def tracking_draft(
    task: TrackingTask, units: int, index: int, seed: int, wording: Template, example_units: int
) -> Draft:
    """`units` lines of noise. `example_units` > 0 puts a solved example before them."""
    rng = np.random.default_rng((seed, index))
    example = ""
    if example_units:
        example_value = str(int(rng.integers(10**4, 10**5)))
        text, ask, prefix, names = _one(
            rng, task.hops, example_units, example_value, EXAMPLE_LETTERS, wording
        )
        example = f"{text}\n{ask}{prefix}{' '.join(names)}\n\n"
    wanted = str(int(rng.integers(10**4, 10**5)))
    text, ask, prefix, names = _one(rng, task.hops, units, wanted, LETTERS, wording)
    return Draft(
        id=str(index),
        context=f"{example}{text}\n",
        question=ask,
        answer_prefix=prefix,
        references=tuple(names),
        scorer=task.scorer,
        max_tokens=task.max_tokens,
        answer=" ".join(names),
    )


def _one(
    rng: Rng, hops: int, units: int, value: str, letters: int, wording: Template
) -> tuple[str, str, str, list[str]]:
    """(instruction and text, question, answer prefix, names of the chain)"""
    names: dict[str, None] = {}
    while len(names) < hops + 1:
        names["".join(rng.choice(list(string.ascii_uppercase), letters))] = None
    chain, before = [], ""
    for name in names:
        part = "link" if before else "first"
        chain.append(wording.text(part, name=name, before=before, value=value))
        before = name
    text = insert_in_lines(rng, [wording.raw("noise")] * units, chain, None)
    text = text.replace(". \n", ".\n")
    known = {"value": value, "count": hops + 1}
    return (
        f"{wording.raw('instruction')}\n\n{text}",
        wording.text("question", **known),
        wording.text("prefix", **known),
        list(names),
    )
