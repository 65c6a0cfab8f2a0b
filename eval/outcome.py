"""What is known of a problem under an arm, and the figures that come of many of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .arms import random_family
from .protocol import pooled_hit
from .results import Result, ResultsFile
from .scoring.statistics import estimate, mean_and_sample_sd, paired_difference
from .store import Record
from .tasks.problem import Problem

Cases = Callable[[Problem], Iterable[str]]
Outcomes = dict[str, dict[str, "Outcome"]]  # by arm and problem; the reference arm comes first
KL_POSITIONS = (1, 2, 4, 8, 16, 32)  # suffix tokens whose own KL is reported


@dataclass(frozen=True)
class Outcome:
    """A problem under one arm: the mean score of its replays, and what sets it off the reference.

    `nll` in nats a token of a right answer; `kl` of the reference's distribution to the arm's, mean
    over suffix tokens, and `kl_at` single ones of them, counted from 1.
    """

    score: float
    records: list[Record]
    nll: float | None = None
    kl: float | None = None
    kl_at: dict[int, float] = field(default_factory=dict)


def problem_id(problem: Problem) -> str:
    return f"{problem.case}/{problem.id}"


def write_results(
    results: ResultsFile,
    suite: str,
    problems: Sequence[Problem],
    outcomes: Outcomes,
    cases: Cases,
) -> None:
    """All figures of all cases: by arm, against the first arm, and over random masks."""
    members: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        for case in cases(problem):
            members[case].append(problem_id(problem))
    first = next(iter(outcomes))
    for case, ids in members.items():
        families: dict[str, list[tuple[float, float]]] = defaultdict(list)
        base = [outcomes[first][i] for i in ids]
        for arm, found in outcomes.items():
            own = [found[i] for i in ids]
            for metric, value, unit, n in _figures(own, None if arm == first else base):
                results.append(Result(suite, case, arm, metric, value, unit, n))
            family = random_family(arm)
            if family is not None:
                kl = [o.kl for o in own if o.kl is not None]
                mean_kl = float(np.mean(kl)) if kl else float("nan")
                families[family].append((float(np.mean([o.score for o in own])), mean_kl))
        for family, values in families.items():
            scores, kls = zip(*values, strict=True)
            for metric, numbers, unit in (("score", scores, "score"), ("kl", kls, "nat")):
                mean, sd = mean_and_sample_sd(numbers)
                if not np.isnan(mean):
                    results.append(Result(suite, case, family, metric, mean, unit, len(values)))
                    results.append(
                        Result(suite, case, family, f"{metric}_sd", sd, unit, len(values))
                    )


def _figures(own: list[Outcome], base: list[Outcome] | None) -> list[tuple[str, float, str, int]]:
    """(metric, value, unit, n) of one arm on one case."""
    score = estimate([o.score for o in own])
    records = [r for o in own for r in o.records]
    loaded = [r for r in records if r["restored"] > 0 or r["cached"] > 0]
    asked = [r for r in loaded if r["recovery"] == r["asked"]]
    out = [
        ("score", score.mean, "score", score.n),
        ("score_se", score.error, "score", score.n),
        ("hit", pooled_hit(records), "ratio", len(records)),
        ("loaded", len(loaded) / len(records), "ratio", len(records)),
        ("as_asked", len(asked) / len(records), "ratio", len(records)),
        ("replayed", float(np.mean([r["replayed"] for r in records])), "token", len(records)),
    ]
    if base is not None:
        paired = paired_difference([o.score for o in own], [o.score for o in base])
        out += [
            ("score_delta", paired.mean, "score", paired.n),
            ("score_delta_se", paired.error, "score", paired.n),
            ("score_delta_low", paired.low, "score", paired.n),
            ("score_delta_high", paired.high, "score", paired.n),
        ]
    nlls = [o.nll for o in own if o.nll is not None]
    if nlls:
        out.append(("nll", float(np.mean(nlls)), "nat/token", len(nlls)))
    if base is not None and len(nlls) == len(own):
        known = [b.nll if b.nll is not None else np.nan for b in base]
        found = estimate(np.subtract(nlls, known))
        out.append(("nll_delta", found.mean, "nat/token", found.n))
        out.append(("nll_delta_se", found.error, "nat/token", found.n))
    kls = [o.kl for o in own if o.kl is not None] if base is not None else []
    if kls:
        mean = estimate(kls)
        out.append(("kl", mean.mean, "nat", mean.n))
        out.append(("kl_se", mean.error, "nat", mean.n))
        for position in KL_POSITIONS:
            there = [o.kl_at[position] for o in own if position in o.kl_at]
            if there:
                out.append((f"kl@{position}", float(np.mean(there)), "nat", len(there)))
    return out
