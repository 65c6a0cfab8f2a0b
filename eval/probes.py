"""Measures finer than accuracy: how an arm's distributions differ at the tokens behind the hit.

A probe runs the prompt and a right answer behind it and reads the log-probabilities. Distributions
come as the target token and the best 20, so the KL is of the distributions coarsened to the tokens
that both arms name and one bucket for all others: a lower bound, near the whole for peaked ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jhybrid.engine.request import MAX_LOGPROBS, SamplingParams, TokenLogprob

from .tasks.problem import Problem

PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
SUFFIX_POSITIONS = 64  # last suffix tokens that are kept: records stay small
FLOOR = 1e-12

Position = dict[int, float]  # log-probability by token


def probe_record(problem: Problem, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
    """`suffix` and `answer`: for each token, [its id, its log-probability, {id: log-probability}].

    A token that ran behind no scored position (the first after the cached prefix) is left out.
    """
    end = len(problem.prompt)
    start = max(problem.boundary, end - SUFFIX_POSITIONS)

    def rows(tokens: Sequence[TokenLogprob | None]) -> list[list[Any] | None]:
        return [t and [t.token_id, t.logprob, dict(t.top)] for t in tokens]

    return {"suffix": rows(logprobs[start:end]), "answer": rows(logprobs[end:])}


def answer_nll(record: Mapping[str, Any]) -> float | None:
    """Mean negative log-probability of the answer's tokens; None where none was scored."""
    scored = [row[1] for row in record["answer"] if row]
    return -sum(scored) / len(scored) if scored else None


def suffix_kl(reference: Mapping[str, Any], arm: Mapping[str, Any]) -> list[float]:
    """KL(reference || arm) in nats at each suffix token that both scored, in order."""
    pairs = zip(reference["suffix"], arm["suffix"], strict=True)
    return [_coarse_kl(_position(a), _position(b)) for a, b in pairs if a and b]


def _position(row: Sequence[Any]) -> Position:
    token, own, top = row
    return {**{int(t): p for t, p in top.items()}, int(token): own}


def _coarse_kl(p: Position, q: Position) -> float:
    shared = sorted(p.keys() & q.keys())
    ps, qs = ([math.exp(x[t]) for t in shared] for x in (p, q))
    ps.append(max(1 - sum(ps), 0.0))
    qs.append(max(1 - sum(qs), FLOOR))
    total = sum(a * math.log(a / max(b, FLOOR)) for a, b in zip(ps, qs, strict=True) if a > FLOOR)
    return max(total, 0.0)
