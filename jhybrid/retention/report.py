"""A plan in numbers: for `python -m jhybrid.plan` and `/server_info`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ..config import ModelConfig
from .ratios import CONV_ITEMSIZE, Ratios, finite, plan_ratios
from .selection import RetentionPlan

QUANTILES = (0, 0.25, 0.5, 0.75, 1)
CLEAR_GAIN = 1.25  # below it selection is hardly worth an approximate recovery


def describe(
    plan: RetentionPlan, config: ModelConfig, tp: int = 1, itemsize: int = CONV_ITEMSIZE
) -> dict[str, Any]:
    """Everything about a plan as JSON values; infinite numbers are None. `itemsize`: of conv."""
    horizons, ratios = plan.horizons, plan_ratios(plan, config, tp, itemsize)
    per_head = plan.keep.mean(axis=2)  # r_lh of appendix A.1
    layer_means = per_head.mean(axis=1)
    mixed = (per_head > 0) & (per_head < 1)
    found = {
        "unit": horizons.unit,
        "rule": plan.rule,
        "w_max": plan.w_max,
        "a_s": horizons.gate_input,
        "gate": config.linear.gate,
        "epsilon": horizons.epsilon,
        "weights": horizons.digest,
        "tp": tp,
        "horizon_quantiles": np.quantile(horizons.values, QUANTILES, method="lower").tolist(),
        "median_decay": float(np.median(horizons.decay)),
        "kept_fraction": plan.kept_fraction,
        "layer_kept_fraction": [float(layer_means.min()), float(layer_means.max())],
        "mixed_heads": float(mixed.mean()),
        "longest_omitted": plan.longest_omitted,
        "replay_window": plan.replay_window,
        "ratios": asdict(ratios),
        "layers": [
            {"layer": layer, "units": int(keep.size), "kept": int(keep.sum())}
            for layer, keep in zip(config.linear_layers, plan.keep, strict=True)
        ],
        "recommendation": recommendation(plan, ratios),
    }
    return finite(found)


def recommendation(plan: RetentionPlan, ratios: Ratios) -> str:
    """What to serve with, from the checkpoint ratios (conv windows included)."""
    gain, alone = ratios.checkpoint_ragged, ratios.int8_alone_checkpoint
    both = ratios.checkpoint_int8
    sizes = f"{gain:.2f}x by selection, {alone:.2f}x by int8, {both:.2f}x by both"
    if gain < CLEAR_GAIN:
        advice = "selection alone gains too little for an approximate recovery; int8 gains most"
    elif gain < alone and plan.horizons.unit == "head":
        advice = "selection alone gains less than int8; int8 beside it gains most"
    else:
        advice = "selection pays; int8 beside it gains most"
    off, storage, hybrid = ratios.placements
    if storage.capacity > 1.02 * off.capacity:
        by = "hybrid" if hybrid.remote_units < storage.remote_units else "storage"
        advice += (
            f"; --placement {by} lifts the fullest rank from {off.capacity:.2f}x "
            f"to {storage.capacity:.2f}x"
        )
    unit = "heads" if plan.horizons.unit == "head" else "channels"
    return f"{sizes} (units are {unit}): {advice}."


def table(found: dict[str, Any]) -> str:
    """The text that the command prints for `describe`'s result."""
    r = found["ratios"]
    low, high = found["layer_kept_fraction"]
    shortest, *_, longest = quantiles = [_tokens(x) for x in found["horizon_quantiles"]]
    lines = [
        f"gate     {found['gate']}, a_s = {found['a_s']:g}, epsilon = {found['epsilon']:g}; "
        f"{r['units']:,} units ({found['unit']}s) in {len(found['layers'])} linear layers",
        f"horizon  {shortest} to {longest} tokens, quartiles {', '.join(quantiles[1:-1])}; "
        f"median decay {found['median_decay']:.3f}",
        f"plan     w_max = {found['w_max']} ({found['rule']}): {r['kept']:,} units kept "
        f"({found['kept_fraction']:.1%}), {low:.1%} to {high:.1%} by layer",
    ]
    if found["unit"] == "channel":
        lines[-1] += f", {found['mixed_heads']:.1%} of heads mixed"
    lines += [
        f"replay   {found['replay_window']} tokens at most; longest omitted horizon "
        f"{_tokens(found['longest_omitted'])}",
        "",
        f"{'compression':24}{'temporal':>12}{'checkpoint':>12}",
        *(
            f"{name:24}{_times(r[f'temporal_{key}']):>12}{_times(r[f'checkpoint_{key}']):>12}"
            for name, key in (("ragged", "ragged"), ("padded", "padded"), ("ragged, int8", "int8"))
        ),
        f"{'int8 alone':24}{_times(r['int8_alone_temporal']):>12}"
        f"{_times(r['int8_alone_checkpoint']):>12}",
        f"{'ragged over padded':24}{_times(r['layout_gain']):>12}",
    ]
    if found["tp"] > 1:
        lines += ["", *_placements(found)]
    return "\n".join([*lines, "", found["recommendation"]])


def _placements(found: dict[str, Any]) -> list[str]:
    head = f"placement, tp {found['tp']}"
    return [
        f"{head:24}{'units a slot':>12}{'remote':>12}{'capacity':>12}{'int8':>12}",
        *(
            f"{p['placement']:24}{p['slot_units']:>12,}{p['remote_units']:>12,}"
            f"{_times(p['capacity']):>12}{_times(p['capacity_int8']):>12}"
            for p in found["ratios"]["placements"]
        ),
    ]


def _times(ratio: float | None) -> str:
    return "all" if ratio is None else f"{ratio:.2f}x"


def _tokens(horizon: float | None) -> str:
    return "infinite" if horizon is None else f"{horizon:,.4g}"
