"""The papers' claims as rules about results, and whether a model's results follow them.

A rule that fails is a finding, too: it is printed beside the figure, and nothing stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .frame import Frame, Record, number, table

# What a model must do for the suites to tell arms apart: least score of the baseline, by task.
SKILLS = {
    "niah_single_1": 0.9,
    "niah_single_2": 0.9,
    "vt": 0.9,
    "cwe": 0.7,
    "fwe": 0.7,
    "niah_multikey_1": 0.7,
    "last_write": 0.9,
}
NEEDLES = ("niah_single_1", "niah_single_2")
DUST = 1e-9  # differences of equal scores, averaged in another order
EXACT_KL = 1e-3  # nat; below it two arms are the same but for rounding


class Finding(NamedTuple):
    """`holds` None: the results do not say."""

    claim: str
    rule: str
    found: str
    holds: bool | None


class Tables:
    """The frames of a model's results, and short ways to ask them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.table, self.curve, self.replay, self.horizons = (
            Frame(suite, records)
            for suite in ("intervention", "retention-curve", "replay-curve", "horizons")
        )

    def cases(self, frame: Frame, *tasks: str) -> list[str]:
        """Those of some tasks (all, if none is named), without those of single depths."""
        whole = [case for case in frame.cases if case.count("/") == 1]
        return [case for case in whole if not tasks or case.split("/")[0] in tasks]

    def windows(self, family: str) -> list[str]:
        """W of every arm family/W, from small to large."""
        found = [re.fullmatch(rf"{family}/(\d+)", arm) for arm in self.curve.arms]
        return sorted((m[1] for m in found if m), key=int)


def findings(records: Sequence[Record]) -> list[Finding]:
    """Of one model."""
    tables = Tables(records)
    return [found for rule in RULES for found in rule(tables)]


def claims(models: Mapping[str, Sequence[Record]]) -> str:
    """A table of all models' findings."""
    rows = [
        [name, f.claim, f.rule, f.found, {True: "yes", False: "no", None: "-"}[f.holds]]
        for name, records in models.items()
        for f in findings(records)
    ]
    return table(["model", "claim", "rule", "found", "holds"], rows)


def _all(values: Sequence[tuple[str, float]], good: Callable[[float], bool]) -> tuple[str, bool]:
    """How many are good, with the ones that are not (five of them) by name."""
    bad = [f"{name} {number(v)}" for name, v in values if not good(v)]
    text = f"{len(values) - len(bad)} of {len(values)}"
    shown = ", ".join([*bad[:5], *(["..."] if len(bad) > 5 else [])])
    return f"{text}; not {shown}" if bad else text, not bad


def _finding(
    claim: str,
    rule: str,
    values: Sequence[tuple[str, float | None]],
    good: Callable[[float], bool],
    note: str = "",
) -> Finding:
    """That all values are good; `note` is said before the count."""
    known = [(name, v) for name, v in values if v is not None]
    if not known:
        return Finding(claim, rule, "not measured", None)
    text, holds = _all(known, good)
    return Finding(claim, rule, note + text, holds)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of so uneven a split where both signs are as likely; ties are left out."""
    n, k = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def _skills(t: Tables) -> Iterator[Finding]:
    for task, least in SKILLS.items():
        values = [(case, t.table.value(case, "baseline", "score"))
                  for case in t.cases(t.table, task)]  # fmt: skip
        yield _finding("the model can", f"{task} >= {least}", values, lambda v, m=least: v >= m)


def _components(t: Tables) -> Iterator[Finding]:
    """dasc Table 1a: recall needs keys and values; order needs the state."""
    for arm in ("zero-full-kv", "mask-full-kv", "zero-both", "mask-both"):
        values = [(c, t.table.value(c, arm, "score")) for c in t.cases(t.table, *NEEDLES)]
        yield _finding("recall needs KV", f"{arm} <= 0.05 on needles", values, lambda v: v <= 0.05)

    def loss(case: str) -> float | None:
        delta = t.table.value(case, "zero-linear", "score_delta")
        return None if delta is None else -delta

    values = [(c, loss(c)) for c in t.cases(t.table, *NEEDLES)]
    rule = "zero-linear loses <= 0.05 on needles"
    yield _finding("recall needs no state", rule, values, lambda v: v <= 0.05)
    values = [(c, loss(c)) for c in t.cases(t.table, "last_write")]
    rule = "zero-linear loses >= 0.2 on last_write"
    yield _finding("order needs the state", rule, values, lambda v: v >= 0.2)
    others = t.cases(t.table, "vt", "cwe", "fwe", "niah_multivalue", "kth_item", "next_item")
    losses = [(c, value) for c in others if (value := loss(c)) is not None]
    worst = max(losses, key=lambda pair: pair[1], default=None)
    text = "not measured" if worst is None else f"{worst[0]} loses {number(worst[1])}"
    holds = None if worst is None else worst[1] >= 0.2
    yield Finding("more than order needs it", "zero-linear loses >= 0.2 on one more", text, holds)
    ratios: list[tuple[str, float | None]] = []
    for case in t.cases(t.table, "last_write"):
        needle = f"niah_single_1/{case.split('/')[1]}"
        own, other = (t.table.value(c, "zero-linear", "kl@1") for c in (case, needle))
        ratios.append((case, own / other if own is not None and other else None))
    rule = "KL at the first token >= 5 x that of niah_single_1"
    yield _finding("order needs the state", rule, ratios, lambda v: v >= 5)


def _masks(t: Tables) -> Iterator[Finding]:
    """dasc section 6: horizons choose better than chance, and much better than their inverse."""
    cells = [(c, w) for w in t.windows("dasc-nr") for c in t.cases(t.curve)]

    def gap(case: str, window: str, metric: str, other: str, sign: int) -> float | None:
        own = t.curve.value(case, f"dasc-nr/{window}", metric)
        value = t.curve.value(case, f"{other}/{window}", metric)
        return None if own is None or value is None else sign * (own - value)

    gaps = [v for c, w in cells if (v := gap(c, w, "score", "random", 1)) is not None]
    apart = [v for v in gaps if abs(v) > DUST]  # where no arm loses anything, masks can't be told
    wins = sum(v > 0 for v in apart)
    text, holds = f"{len(apart)} of {len(gaps)} cells differ", None
    if apart:
        p, holds = sign_test(wins, len(apart) - wins), wins >= 0.8 * len(apart)
        gain = number(float(np.mean(apart)))
        text = f"{wins} of {len(apart)} (sign test p {number(p)}), by {gain} on average; {text}"
    rule = "score above the mean of the random masks in 80 % of the cells that differ"
    yield Finding("dasc beats random masks", rule, text, holds)
    values = [(f"{c}@{w}", gap(c, w, "kl", "random", -1)) for c, w in cells]
    rule = "KL below the mean of the random masks in all cells"
    yield _finding("dasc beats random masks", rule, values, lambda v: v >= 0)
    values = [(f"{c}@{w}", gap(c, w, "kl", "inverse", -1)) for c, w in cells]
    yield _finding("control", "KL of the inverse mask is larger", values, lambda v: v >= 0)
    values = [(f"{c}@{w}", t.curve.value(c, f"dasc-nr/{w}/int8", "score_delta"))
              for c, w in cells]  # fmt: skip
    nr = {f"{c}@{w}": t.curve.value(c, f"dasc-nr/{w}", "score_delta") for c, w in cells}
    extra = [(name, v - base) for name, v in values
             if v is not None and (base := nr[name]) is not None]  # fmt: skip
    yield _finding("INT8 costs nothing", "score >= dasc-nr's - 0.02", extra, lambda v: v >= -0.02)


def _refresh(t: Tables) -> Iterator[Finding]:
    """dasc section 4.4, and what replaying exact group inputs adds to it."""
    cells = [(c, w) for w in t.windows("dasc-wr") for c in t.cases(t.curve)]
    recovered: list[tuple[str, float | None]] = []
    scores: list[tuple[str, float | None]] = []
    anchored: list[tuple[str, float | None]] = []
    for case, window in cells:
        name = f"{case}@{window}"
        nr, wr, exact = (t.curve.value(case, f"{arm}/{window}", "kl")
                         for arm in ("dasc-nr", "dasc-wr", "anchored"))  # fmt: skip
        if nr is not None and wr is not None and nr > EXACT_KL:
            recovered.append((name, 1 - wr / nr))
        if wr is not None and exact is not None:
            anchored.append((name, exact - wr))
        low, high = (t.curve.value(case, f"{arm}/{window}", "score")
                     for arm in ("dasc-nr", "dasc-wr"))  # fmt: skip
        scores.append((name, None if low is None or high is None else high - low))
    rule = f"half of the KL of dasc-nr, where that is above {EXACT_KL}"
    shares = [v for _, v in recovered if v is not None]
    note = f"median {np.median(shares):.0%}; " if shares else ""
    yield _finding("refresh recovers", rule, recovered, lambda v: v >= 0.5, note)
    yield _finding("refresh recovers", "score >= dasc-nr's - 0.02", scores, lambda v: v >= -0.02)
    rule = "KL <= dasc-wr's + 1e-5 at equal replayed tokens"
    less, more = (sum(v is not None and sign * v > 1e-5 for _, v in anchored) for sign in (-1, 1))
    p = sign_test(less, more)
    note = f"lower in {less}, higher in {more} cells by over 1e-5 (sign test p {number(p)}); "
    claim = "anchored is no worse than refresh"
    yield _finding(claim, rule, anchored, lambda v: v <= 1e-5, note if anchored else "")


def _tail(t: Tables) -> Iterator[Finding]:
    """Tail-Replay Table 1."""
    ratios = sorted((arm.split("/")[1] for arm in t.replay.arms if arm.startswith("tail-replay/")),
                    key=float)  # fmt: skip
    cases = t.cases(t.replay)
    for ratio in (r for r in ratios if float(r) in (0.05, 0.1)):
        kept: list[tuple[str, float | None]] = []
        for case in cases:
            full, own = (t.replay.value(case, arm, "score")
                         for arm in ("dense", f"tail-replay/{ratio}"))  # fmt: skip
            kept.append((case, own / full if own is not None and full else None))
        rule = f"{float(ratio):.0%} of the prefix keeps 0.9 of the score"
        shares = [v for _, v in kept if v is not None]
        note = f"mean {np.mean(shares):.1%}; " if shares else ""
        yield _finding("a short tail suffices", rule, kept, lambda v: v >= 0.9, note)
    steps: list[tuple[str, float | None]] = []
    for case in cases:
        kl = [
            t.replay.value(case, arm, "kl")
            for arm in ("zero", *(f"tail-replay/{r}" for r in ratios))
        ]
        known = [v for v in kl if v is not None]
        rises = [b - a for a, b in zip(known, known[1:], strict=False)]
        steps.append((case, max(rises) if rises else None))
    rule = "KL never rises with the ratio by more than 0.01"
    yield _finding("more is better", rule, steps, lambda v: v <= 0.01)
    if ratios and float(ratios[-1]) == 1:
        values = [(c, t.replay.value(c, f"tail-replay/{ratios[-1]}", "kl")) for c in cases]
        rule = f"KL of a whole replay < {EXACT_KL}"
        yield _finding("all of it is exact", rule, values, lambda v: v < EXACT_KL)


def _horizons(t: Tables) -> Iterator[Finding]:
    """dasc Table 1b."""
    for pair, least in (("H_s, H_e", 0.6), ("H_s, M_S", 0.3)):
        values = [(case, t.horizons.value(case, pair, "median")) for case in t.horizons.cases]
        rule = f"median Spearman of {pair} > {least}"
        known = [v for _, v in values if v is not None]
        text = ", ".join(number(v) for v in known) or "not measured"
        yield Finding("weights tell horizons", rule, text, min(known) > least if known else None)


RULES = (_skills, _components, _masks, _refresh, _tail, _horizons)
