"""Records by suite, case, arm and metric, and how numbers are printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]


class Frame:
    """The records of one suite. Cases and arms keep the order in which they first occur."""

    def __init__(self, suite: str, records: Iterable[Record]) -> None:
        self.suite = suite
        self.records = [r for r in records if r["suite"] == suite]
        self._values = {(r["case"], r["arm"], r["metric"]): r for r in self.records}
        self.cases = list(dict.fromkeys(r["case"] for r in self.records))
        self.arms = list(dict.fromkeys(r["arm"] for r in self.records))

    def value(self, case: str, arm: str, metric: str) -> float | None:
        record = self._values.get((case, arm, metric))
        return None if record is None else record["value"]

    def count(self, case: str, arm: str, metric: str) -> int:
        record = self._values.get((case, arm, metric))
        return 0 if record is None else record["n"]

    def mean(self, cases: Sequence[str], arm: str, metric: str) -> float | None:
        """The plain mean over cases; None unless all of them have the metric."""
        values = [self.value(case, arm, metric) for case in cases]
        found = [v for v in values if v is not None]
        return sum(found) / len(found) if found and len(found) == len(values) else None


def frames(records: Sequence[Record]) -> list[Frame]:
    return [Frame(s, records) for s in dict.fromkeys(r["suite"] for r in records)]


def number(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return "-"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def with_error(value: float | None, error: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    shown = number(value, digits)
    return shown if error is None or math.isnan(error) else f"{shown} ± {number(error, digits)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)
