"""Where the kept units of a checkpoint lie in a slot of the compressed pool (dasc appendix B).

Ragged (scheme 2) packs the units of all layers end to end; padded (scheme 1) reserves the largest
layer's count for every layer. Both are gathers of state rows: row (l, h, k) of a rank's state
[Ll, H / P, K, V] is number (l * H / P + h) * K + k. Ranks share one slot width, -1 pads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int32

from ..config import require
from .selection import RetentionPlan

LayoutKind = Literal["ragged", "padded"]


@dataclass(frozen=True, eq=False)
class Layout:
    """`units[rank, position]` is a rank's unit number or -1; layer l begins at `offsets[rank, l]`.

    A unit is `unit_rows` consecutive rows. Unit numbers are rank-local, in the order of
    (layer, head, channel).
    """

    kind: LayoutKind
    units: Int32[np.ndarray, "P W"]
    offsets: Int32[np.ndarray, "P Ll1"]
    unit_rows: int

    @property
    def rows(self) -> Int32[np.ndarray, "P R"]:
        """The state row at each row of a slot, or -1, for every rank."""
        return rows_of(self.units, self.unit_rows)

    @property
    def slot_rows(self) -> int:
        """Rows that one slot takes on every rank."""
        return self.units.shape[1] * self.unit_rows


def rows_of(units: Int32[np.ndarray, "*N W"], unit_rows: int) -> Int32[np.ndarray, "*N R"]:
    """State rows of unit numbers; -1 stays -1."""
    rows = units[..., None] * unit_rows + np.arange(unit_rows, dtype=np.int32)
    rows = np.where(units[..., None] < 0, np.int32(-1), rows)
    return rows.reshape(*units.shape[:-1], -1)


def make_layout(plan: RetentionPlan, tp: int = 1, kind: LayoutKind = "ragged") -> Layout:
    """The compute-local layout: every rank stores the kept units of its own heads."""
    require(kind in ("ragged", "padded"), "layout", kind, "ragged or padded")
    masks = rank_masks(plan, tp)  # [P, Ll, N]
    counts = masks.sum(axis=2)
    if kind == "padded":
        largest = int(counts.max())
        starts = np.broadcast_to(np.arange(masks.shape[1] + 1) * largest, (tp, masks.shape[1] + 1))
    else:
        starts = np.concatenate([np.zeros((tp, 1), np.int64), counts.cumsum(axis=1)], axis=1)
    units = np.full((tp, int(starts[:, -1].max())), -1, np.int32)
    rank, layer, unit = np.nonzero(masks)
    place = masks.cumsum(axis=2)[rank, layer, unit] - 1
    units[rank, starts[rank, layer] + place] = layer * masks.shape[2] + unit
    return Layout(kind, units, starts.astype(np.int32), plan.horizons.rows)


def rank_masks(plan: RetentionPlan, tp: int) -> Bool[np.ndarray, "P Ll N"]:
    """The kept units of each rank's heads, in rank-local order within a layer."""
    layers, heads, channels = plan.keep.shape
    require(tp >= 1 and heads % tp == 0, "tp", tp, f"a divisor of the {heads} value heads")
    cut = plan.keep.reshape(layers, tp, heads // tp * channels)
    return np.moveaxis(cut, 1, 0)


def kept_per_rank(plan: RetentionPlan, tp: int) -> Int[np.ndarray, " P"]:
    """Units that each rank's heads keep: U_r of the paper."""
    return rank_masks(plan, tp).sum(axis=(1, 2))
