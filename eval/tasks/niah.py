"""RULER's needle tasks: keyed values hidden in a haystack, some of them asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .haystacks import Essay, distinct, insert_at_depths, insert_in_lines, value
from .problem import Draft
from .wording import Template
from .words import Rng, Words

_NOUNS = {"numbers": "number", "words": "word", "uuids": "uuid"}


@dataclass(frozen=True)
class NeedleTask:
    """`keys` needles of `values` values each, of which `queries` are asked for."""

    haystack: Literal["noise", "essay", "needle"]
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    max_tokens: int = 128
    scorer: str = "string_match_all"


NEEDLES = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("essay"),
    "niah_single_3": NeedleTask("essay", value_kind="uuids"),
    "niah_multikey_1": NeedleTask("essay", keys=4),
    "niah_multikey_2": NeedleTask("needle"),
    "niah_multikey_3": NeedleTask("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": NeedleTask("essay", values=4),
    "niah_multiquery": NeedleTask("essay", keys=4, queries=4),
}


def needle_draft(
    task: NeedleTask,
    units: int,
    index: int,
    seed: int,
    words: Words,
    wording: Template,
    essay: Essay | None,
    depth: int | None = None,
) -> Draft:
    """Problem number `index` with `units` haystack units.

    `depth` (per cent of the haystack) places the needle of a single-needle task. The order of the
    needles comes from a fresh generator of `seed`, as in RULER, and is the same in all problems.
    The answer has the keys in the order of the question, the values of each in that of the text.
    """
    rng = np.random.default_rng((seed, index))
    keys = distinct(rng, task.key_kind, words, task.keys)
    values = [distinct(rng, task.value_kind, words, task.values) for _ in keys]
    types = task.value_kind
    pairs = [(i, v) for i, found in enumerate(values) for v in found]
    pairs = [pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))]
    needle = [
        wording.text("needle", types=types, type=_NOUNS[types], key=keys[i], value=v)
        for i, v in pairs
    ]
    depths = None if depth is None else [depth] * len(needle)
    context = _haystack(task, units, needle, depths, rng, words, wording, essay)
    asked = sorted(rng.choice(len(keys), task.queries, replace=False).tolist())
    answers = [v for i in asked for key, v in pairs if key == i]
    form = wording.raw("one" if len(answers) == 1 else "many")
    named = {"type": _NOUNS[types], "types": types, "keys": listed([keys[i] for i in asked])}
    return Draft(
        id=str(index) if depth is None else f"{index}@{depth}",
        context=f"{form['instruction'].format(**named)}\n{context}\n",
        question=form["question"].format(**named),
        answer_prefix=form["prefix"].format(**named),
        references=tuple(answers),
        scorer=task.scorer,
        max_tokens=task.max_tokens,
        answer=f" {listed(answers)}",
        tags={} if depth is None else {"depth": depth},
    )


def _haystack(
    task: NeedleTask,
    units: int,
    needles: list[str],
    depths: list[int] | None,
    rng: Rng,
    words: Words,
    wording: Template,
    essay: Essay | None,
) -> str:
    if task.haystack == "essay":
        assert essay is not None
        return insert_at_depths(rng, essay.sentences(units), needles, depths)
    if task.haystack == "noise":
        return insert_in_lines(rng, [wording.raw("noise")] * units, needles, depths)
    kinds = (task.key_kind, task.value_kind)
    others = [tuple(value(rng, kind, words) for kind in kinds) for _ in range(units)]
    types = task.value_kind
    lines = [
        wording.text("needle", types=types, type=_NOUNS[types], key=key, value=v)
        for key, v in others
        if not any(key in needle for needle in needles)
    ]
    return insert_in_lines(rng, lines, needles, depths)


def listed(items: list[str]) -> str:
    """a / a and b / a, b, and c"""
    if len(items) < 3:
        return " and ".join(items)
    return f"{', '.join(items[:-1])}, and {items[-1]}"
