"""The table and the plot of suite `ttft`, from its records alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .results import read_results

FULL = "full_prefill"
Table = dict[str, dict[str, float]]  # case -> arm -> ms


def write_report(folder: Path) -> None:
    """summary.md and, where matplotlib is installed, ttft.png in DIR, from DIR/results.jsonl."""
    found = read_results(folder)
    records = [r for r in found if (r["suite"], r["metric"]) == ("ttft", "ttft")]
    table: Table = {}
    for r in records:
        table.setdefault(r["case"], {})[r["arm"]] = r["value"]
    text = _markdown(table, records)
    (folder / "summary.md").write_text(text)
    print(f"\n{text}")
    if importlib.util.find_spec("matplotlib"):
        _plot(table, folder / "ttft.png")


def _markdown(table: Table, records: list[dict[str, Any]]) -> str:
    arms = list(dict.fromkeys(r["arm"] for r in records))
    head = " | ".join(["ms (times full prefill)", *arms])
    rows = [f"| {head} |", "|---" * (len(arms) + 1) + "|"]
    for case, times in table.items():
        cells = [_cell(times.get(arm), times.get(FULL)) for arm in arms]
        rows.append(f"| {case} | " + " | ".join(cells) + " |")
    last = records[-1]
    source = f"`{last['command']}` at {last['commit']} on {last['device']}"
    return "# Time to first token\n\n" + "\n".join(rows) + f"\n\nMeans. {source}\n"


def _cell(value: float | None, full: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if not full else f"{value:.1f} ({full / value:.1f}x)"


def _plot(table: Table, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    arms = list(dict.fromkeys(arm for times in table.values() for arm in times))
    lengths = {case: int(case.rsplit("/", 1)[1]) for case in table}
    for arm in arms:
        points = sorted((lengths[c], times[arm]) for c, times in table.items() if arm in times)
        axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set(xlabel="matched tokens", ylabel="time to first token (ms)", yscale="log")
    axes.set_title(next(iter(table)).rsplit("/", 1)[0])
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
