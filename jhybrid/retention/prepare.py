"""From a plan to what an engine needs: the head order, the plan in that order, the movers' maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from ..config import ModelConfig, require
from .layout import LayoutKind, kept_per_rank, make_layout
from .maps import MoveMaps, make_maps
from .permutation import head_order, permute_plan
from .placement import PLACEMENTS, PlacementKind, balance_storage
from .selection import RetentionPlan


@dataclass(frozen=True, eq=False)
class Prepared:
    """`order` is for `permute_params`, None where heads stay; `plan` is already in that order."""

    plan: RetentionPlan
    order: Int[np.ndarray, "Ll Hk"] | None
    maps: MoveMaps

    @property
    def slot_rows(self) -> int:
        """Rows that one compressed slot takes on every rank."""
        return self.maps.rows.shape[1]


def prepare(
    plan: RetentionPlan,
    config: ModelConfig,
    tp: int = 1,
    *,
    layout: LayoutKind = "ragged",
    placement: PlacementKind = "off",
) -> Prepared:
    """Place a plan over `tp` ranks. Balanced storage packs units as they come, so it is ragged."""
    require(placement in PLACEMENTS, "placement", placement, f"one of {', '.join(PLACEMENTS)}")
    balanced = placement != "off"
    require(not balanced or layout == "ragged", "layout", layout, f"ragged for {placement}")
    order = head_order(plan, config.linear, tp) if placement == "hybrid" else None
    if order is not None:
        plan = permute_plan(plan, order)
    storage = balance_storage(kept_per_rank(plan, tp)) if balanced else None
    return Prepared(plan, order, make_maps(plan, make_layout(plan, tp, layout), storage))
