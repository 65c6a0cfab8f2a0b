"""Figures of a plan in the manner of the dasc paper's figures 1 and 5 to 8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ..config import ModelConfig
from ..retention.selection import RetentionPlan

try:
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, Colormap
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ValueError("--plots: needs matplotlib: pip install 'jhybrid[plots]'") from error

FULL_ATTENTION = "0.8"  # gray
BINS = (4, 16, 64, 128, 512, 1024)  # tokens; horizon maps show ranges, as the paper's do


def write_plots(plan: RetentionPlan, config: ModelConfig, name: str, folder: Path) -> list[Path]:
    """PNG files in `folder`: decay, horizons, kept, and channels where they are units."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, figure in _figures(plan, config, name):
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def _figures(plan: RetentionPlan, config: ModelConfig, name: str) -> Iterator[tuple[str, Figure]]:
    horizons, channels = plan.horizons, plan.horizons.unit == "channel"
    yield "decay", decay_profile(horizons.decay, name, horizons.unit)
    # of channels, the map shows the median over a head
    per_head = np.median(horizons.values, axis=2)
    label = "median horizon of a head's channels" if channels else "horizon of a head"
    yield "horizons", horizon_map(_by_block(per_head, config), f"{name}: {label} (tokens)")
    kept = _by_block(plan.keep.mean(axis=2), config)
    yield "kept", kept_map(kept, f"{name}: kept {horizons.unit}s, w_max = {plan.w_max}")
    if channels:
        fractions = plan.keep.mean(axis=(1, 2))
        layer = int(np.abs(fractions - np.median(fractions)).argmin())
        title = f"{name}: channel horizons of block {config.linear_layers[layer]} (tokens)"
        figure = horizon_map(horizons.values[layer], title)
        figure.axes[0].set(xlabel="key channel", ylabel="head")
        yield "channels", figure


def decay_profile(decay: Float[np.ndarray, "Ll H U"], name: str, unit: str) -> Figure:
    """Figure 1: one-step decay of all units, in ascending order."""
    values = np.sort(decay.ravel())
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.linspace(0, 1, len(values)), values)
    axes.axhline(np.median(values), color="0.5", linestyle=":")
    axes.set(
        xlabel=f"share of {unit}s",
        ylabel="one-step decay",
        ylim=(0, 1.02),
        title=f"{name}: static decay, median {np.median(values):.3f}",
    )
    return figure


def horizon_map(values: Float[np.ndarray, "X Y"], title: str) -> Figure:
    """Figures 5 and 7: horizons by range; NaN rows are full attention."""
    norm = BoundaryNorm(BINS, len(BINS) + 1, extend="both")
    return _map(values, title, _colors("viridis", len(BINS) + 1), norm=norm)


def kept_map(fractions: Float[np.ndarray, "X Y"], title: str) -> Figure:
    """Figures 6 and 8: the kept share of every head; NaN rows are full attention."""
    return _map(fractions, title, _colors("cividis", 256), vmin=0, vmax=1)


def _colors(name: str, count: int) -> Colormap:
    return colormaps[name].resampled(count).with_extremes(bad=FULL_ATTENTION)


def _map(values: Any, title: str, colors: Any, **scale: Any) -> Figure:
    rows, columns = values.shape
    height = min(14.0, max(3.0, 0.16 * rows + 1.2))
    figure = Figure(figsize=(min(14.0, max(5.0, 0.1 * columns + 3)), height), layout="constrained")
    axes = figure.subplots()
    masked = np.ma.masked_invalid(np.where(np.isposinf(values), np.finfo(float).max, values))
    image = axes.imshow(masked, aspect="auto", cmap=colors, interpolation="nearest", **scale)
    axes.set(xlabel="head", ylabel="block", title=title)
    figure.colorbar(image, ax=axes)
    return figure


def _by_block(values: Float[np.ndarray, "Ll H"], config: ModelConfig) -> np.ndarray:
    """A row for every layer of the model, NaN where it is full attention."""
    rows = np.full((len(config.layers), values.shape[1]), np.nan)
    rows[list(config.linear_layers)] = values
    return rows
