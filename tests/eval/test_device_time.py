"""Spans: how many runs are timed at once, and what counts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from jhybrid.eval import device_time
from jhybrid.eval.device_time import REPEAT, SETTLE, SPAN, median_span


def clock(overhead: float, run: float, rest: float) -> tuple[Callable[[int], float], list[int]]:
    """Spans of a device that needs `rest` seconds of work until it runs as fast as it will."""
    done, asked = 0.0, list[int]()

    def span(runs: int) -> float:
        nonlocal done
        asked.append(runs)
        took = overhead + runs * run * (2.0 if done < rest else 1.0)
        done += took
        return took

    return span, asked


def test_a_run_is_timed_among_many_and_on_a_settled_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    span, asked = clock(overhead=4e-4, run=8e-3, rest=0.2)
    assert median_span(span) == pytest.approx(8e-3, rel=4e-4 / SPAN * 2.1)
    assert asked[:2] == [1, 1] and set(asked[2:]) == {round(SPAN / 16.4e-3)}
    assert len(asked) - 2 - REPEAT >= SETTLE / (6 * 16.4e-3) - 1


def test_a_long_run_is_a_span_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    span, asked = clock(overhead=0.0, run=2.0, rest=0.0)
    assert median_span(span) == 2.0 and set(asked) == {1}


def test_a_dry_run_runs_once() -> None:
    span, asked = clock(overhead=0.0, run=1.0, rest=0.0)
    assert device_time.jax.default_backend() == "cpu"
    assert median_span(span) == 1.0 and asked == [1]
