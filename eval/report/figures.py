"""PNG figures from result records: bars of arms, curves over a parameter, serving panels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .frame import Frame, Record, frames

MOST_BARS = 24
_CURVE = re.compile(r"(?P<family>[a-z-]+?)(?:-\d+)?/(?P<x>\d+(?:\.\d+)?)(?P<rest>/int8)?$")


def write_figures(records: Sequence[Record], folder: Path) -> list[Path]:
    """One PNG or more a suite; returns the paths."""
    written = []
    for frame in frames(records):
        for name, figure in _figures(frame, records):
            path = folder / f"{frame.suite}-{name}.png"
            dpi = 120 if figure.get_figheight() < 12 else 70  # many panels, for a look
            figure.savefig(path, dpi=dpi, bbox_inches="tight")
            written.append(path)
    return written


def _figures(frame: Frame, records: Sequence[Record]) -> list[tuple[str, Figure]]:
    match frame.suite:
        case "retention-curve" | "ruler":
            return _curves(frame, "w_max (tokens)", log_x=True)
        case "replay-curve":
            return _curves(frame, "replay ratio", log_x=True)
        case "trace":
            return [("serving", _serving(frame)), *_trade_off(frame, records)]
        case "intervention" | "longbench" | "locomo" | "choice" | "math":
            return [("score", _bars(frame))]
        case _:
            return []


def _panels(count: int, width: float = 4.2, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, axes


def _bars(frame: Frame) -> Figure:
    """Scores with standard errors, a group a case."""
    cases = frame.cases[:MOST_BARS]
    figure, (axes,) = _panels(1, width=max(5.0, 0.9 * len(cases) + 2))
    width = 0.8 / len(frame.arms)
    for n, arm in enumerate(frame.arms):
        values = [frame.value(case, arm, "score") or 0.0 for case in cases]
        errors = [
            frame.value(case, arm, "score_se") or frame.value(case, arm, "score_sd") or 0.0
            for case in cases
        ]
        at = [i + n * width for i in range(len(cases))]
        axes.bar(at, values, width, yerr=errors, label=arm, error_kw={"linewidth": 0.8})
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], cases)
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel("score")
    axes.legend(fontsize="small")
    return figure


def _curves(frame: Frame, label: str, *, log_x: bool) -> list[tuple[str, Figure]]:
    """dasc Figure 4 d and h: a panel a case, a line a family of arms, dense as a level."""
    families = _families(frame.arms)
    if not families:
        return [("score", _bars(frame))]
    out = []
    for metric, unit, log_y in (("score", "score", False), ("kl", "KL(dense ‖ arm), nat", True)):
        figure, panels = _panels(len(frame.cases))
        drawn = False
        for axes, case in zip(panels, frame.cases, strict=True):
            for family, points in families.items():
                found = [(x, frame.value(case, arm, metric), arm) for x, arm in points]
                known = [(x, v, arm) for x, v, arm in found if v is not None]
                if known:
                    drawn = True
                    xs, ys, arms = zip(*known, strict=True)
                    errors = [
                        frame.value(case, arm, f"{metric}_sd")
                        or frame.value(case, arm, f"{metric}_se")
                        or 0.0
                        for arm in arms
                    ]
                    axes.errorbar(xs, ys, errors, marker="o", markersize=3, label=family)
            for arm, style in (("dense", "-"), ("zero", ":")):
                level = frame.value(case, arm, metric)
                if level is not None and (metric == "score" or level > 0):
                    axes.axhline(level, color="gray", linestyle=style, linewidth=1, label=arm)
            axes.set(title=case, xlabel=label, ylabel=unit)
            if log_x:
                axes.set_xscale("log", base=2 if "token" in label else 10)
            if log_y:
                axes.set_yscale("log")
        if drawn:
            panels[0].legend(fontsize="x-small")
            out.append((metric, figure))
    return out


def _families(arms: Sequence[str]) -> dict[str, list[tuple[float, str]]]:
    """Arms that differ in one number, by the rest of the name, in the order of that number.

    The masks of one random family are left to the family's own mean.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    for arm in arms:
        match = _CURVE.fullmatch(arm)
        if match is not None and not re.match(r"random-\d", arm):
            name = match["family"] + (match["rest"] or "")
            found.setdefault(name, []).append((float(match["x"]), arm))
    return {name: sorted(points) for name, points in found.items()}


def _serving(frame: Frame) -> Figure:
    """dasc Figure 4 a-c: capacity, mean TTFT and mean E2E of each arm."""
    panels: list[tuple[str, str]] = [
        ("capacity", "checkpoint slots"),
        ("ttft_mean", "mean TTFT, s"),
        ("e2e_mean", "mean E2E, s"),
        ("hit", "token hit rate"),
        ("ttft_p95", "P95 TTFT, s"),
        ("e2e_p95", "P95 E2E, s"),
    ]
    figure, axes = _panels(len(panels))
    pairs = [(case, arm) for case in frame.cases for arm in frame.arms]
    for panel, (metric, label) in zip(axes, panels, strict=True):
        known = [(c, a) for c, a in pairs if frame.value(c, a, metric) is not None]
        names = [arm if len(frame.cases) == 1 else f"{case} {arm}" for case, arm in known]
        values: Any = [frame.value(case, arm, metric) for case, arm in known]
        errors = [frame.value(case, arm, f"{metric}_sd") or 0.0 for case, arm in known]
        panel.barh(names, values, xerr=errors)
        panel.set_xlabel(label)
        panel.invert_yaxis()
    return figure


def _trade_off(frame: Frame, records: Sequence[Record]) -> list[tuple[str, Figure]]:
    """dasc Figure 4 l: mean score of a quality suite in the same results against mean TTFT."""
    quality = [
        f
        for f in frames(records)
        if f.suite not in ("trace", "kernels", "model", "ttft", "retention-load")
    ]
    out = []
    for other in quality:
        points = []
        for arm in frame.arms:
            score = other.mean(other.cases, arm, "score")
            ttft = frame.mean(frame.cases, arm, "ttft_mean")
            if score is not None and ttft is not None:
                points.append((ttft, score, arm))
        if points:
            figure, (axes,) = _panels(1)
            for ttft, score, arm in points:
                axes.scatter(ttft, score)
                axes.annotate(arm, (ttft, score), fontsize="x-small")
            axes.set(xlabel="mean TTFT, s", ylabel=f"score ({other.suite})")
            out.append((f"trade-off-{other.suite}", figure))
    return out
