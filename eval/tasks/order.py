"""Tasks that only order can solve: last write wins, k-th item from the end, what came before.

A model whose attention has no positional encoding must keep order in its recurrent state, so these
are where leaving out state has to show (RULER has no such task).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .haystacks import insert_in_lines
from .problem import Draft
from .wording import Template
from .words import Rng, Words


@dataclass(frozen=True)
class OrderTask:
    """`last_write`: `holders` things get new values over and over."""

    name: str
    holders: int = 4
    max_tokens: int = 16
    scorer: str = "starts_with"


ORDER = {name: OrderTask(name) for name in ("last_write", "kth_item", "next_item")}


def order_draft(
    task: OrderTask, units: int, index: int, seed: int, words: Words, wording: Template
) -> Draft:
    """`units` statements, with a line of noise for every four of them."""
    rng = np.random.default_rng((seed, index))
    form = wording.raw(task.name)
    if task.name == "last_write":
        told, named, answer = _writes(rng, task.holders, units, words, wording)
    else:
        values = _numbers(rng, units)
        told = [wording.text("item", value=v) for v in values]
        place = int(rng.integers(1, min(units, 9) + 1))
        if task.name == "kth_item":
            named, answer = {"k": place}, values[-place]
        else:
            at = int(rng.integers(1, units)) if units > 1 else 0
            named, answer = {"value": values[at]}, values[max(at - 1, 0)]
    text = insert_in_lines(rng, [wording.raw("noise")] * (units // 4), told, None)
    return Draft(
        id=str(index),
        context=f"{form['instruction']}\n{text}\n",
        question=form["question"].format(**named),
        answer_prefix=form["prefix"].format(**named),
        references=(answer,),
        scorer=task.scorer,
        max_tokens=task.max_tokens,
        answer=f" {answer}.",
    )


def _writes(
    rng: Rng, count: int, units: int, words: Words, wording: Template
) -> tuple[list[str], dict[str, str], str]:
    """(statements, names for the question, the value it asks for)"""
    pairs = [f"the {words.pair(rng).replace('-', ' ')}" for _ in range(count)]
    holders = list(dict.fromkeys(pairs))
    now: dict[str, str] = {}
    told = []
    for new in _numbers(rng, units):
        holder = holders[int(rng.integers(len(holders)))]
        now[holder] = new
        told.append(wording.text("write", Holder=_capital(holder), holder=holder, value=new))
    asked = list(now)[int(rng.integers(len(now)))]
    return told, {"holder": asked, "Holder": _capital(asked)}, now[asked]


def _numbers(rng: Rng, count: int) -> list[str]:
    """Distinct numbers of five digits."""
    return [str(n) for n in 10**4 + rng.choice(9 * 10**4, count, replace=False)]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
