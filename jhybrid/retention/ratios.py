"""What a plan saves: the ratios of dasc eq. 6 and appendix B, and the int8 variants (appendix E).

Counts are bytes of one checkpoint: temporal state in float32 (or int8 with a float32 scale a row),
conv windows uncompressed. Capacity under tensor parallelism is that of the fullest rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..config import ModelConfig
from .layout import LayoutKind, kept_per_rank, make_layout
from .permutation import head_order, permute_plan
from .placement import PLACEMENTS, PlacementKind, balance_storage
from .selection import RetentionPlan

CheckpointDtype = Literal["float32", "int8"]
CONV_ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of one checkpoint, in all layers of all ranks."""

    temporal: int
    conv: int

    @property
    def total(self) -> int:
        return self.temporal + self.conv


def row_bytes(value_dim: int, dtype: CheckpointDtype) -> int:
    """Bytes of one stored row of the temporal state."""
    return 4 * value_dim if dtype == "float32" else value_dim + 4


def conv_bytes(config: ModelConfig, itemsize: int = CONV_ITEMSIZE) -> int:
    """Bytes of the conv windows of all linear layers."""
    c = config.linear
    channels = c.key_heads * c.conv_width
    return len(config.linear_layers) * (c.conv_size - 1) * channels * itemsize


def dense_bytes(
    config: ModelConfig, dtype: CheckpointDtype = "float32", itemsize: int = CONV_ITEMSIZE
) -> CheckpointBytes:
    """A checkpoint that keeps every unit."""
    c = config.linear
    rows = len(config.linear_layers) * c.value_heads * c.key_dim
    return CheckpointBytes(rows * row_bytes(c.value_dim, dtype), conv_bytes(config, itemsize))


def slot_bytes(
    config: ModelConfig, slot_rows: int, tp: int, dtype: CheckpointDtype, itemsize: int
) -> CheckpointBytes:
    """One slot of the compressed pool over `tp` ranks, each `slot_rows` rows wide."""
    temporal = tp * slot_rows * row_bytes(config.linear.value_dim, dtype)
    return CheckpointBytes(temporal, conv_bytes(config, itemsize))


@dataclass(frozen=True)
class Placed:
    """A plan over `tp` ranks. `capacity` is C_ckpt of the fullest rank, ragged."""

    placement: PlacementKind
    rank_units: tuple[int, ...]  # kept units by the rank that computes them
    slot_units: int  # units that a slot is wide on every rank
    remote_units: int  # M_remote
    capacity: float
    capacity_int8: float


@dataclass(frozen=True)
class Ratios:
    """All ratios of a plan; a ratio is inf where nothing is kept."""

    units: int
    kept: int
    largest_layer: int  # R_max
    mean_layer: float  # mean r_l
    temporal_ragged: float  # C_temp^rag
    temporal_padded: float  # C_temp^pad
    layout_gain: float  # R_max / mean r_l
    checkpoint_ragged: float  # C_ckpt^rag
    checkpoint_padded: float
    temporal_int8: float  # ragged, kept rows in int8
    checkpoint_int8: float
    int8_alone_temporal: float  # every unit kept, temporal state only
    int8_alone_checkpoint: float
    placements: tuple[Placed, ...]


def plan_ratios(
    plan: RetentionPlan, config: ModelConfig, tp: int = 1, itemsize: int = CONV_ITEMSIZE
) -> Ratios:
    """Eq. 6 over all ranks together, and the bottleneck of each placement over `tp` ranks."""
    dense, quantized = (dense_bytes(config, d, itemsize) for d in ("float32", "int8"))
    counts = plan.kept_per_layer

    def gain(kind: LayoutKind, dtype: CheckpointDtype = "float32") -> tuple[float, float]:
        rows = make_layout(plan, 1, kind).slot_rows
        slot = slot_bytes(config, rows, 1, dtype, itemsize)
        return _ratio(dense.temporal, slot.temporal), _ratio(dense.total, slot.total)

    (temporal_ragged, ragged), (temporal_padded, padded) = gain("ragged"), gain("padded")
    temporal_int8, checkpoint_int8 = gain("ragged", "int8")
    return Ratios(
        units=plan.keep.size,
        kept=int(counts.sum()),
        largest_layer=int(counts.max()),
        mean_layer=float(counts.mean()),
        temporal_ragged=temporal_ragged,
        temporal_padded=temporal_padded,
        layout_gain=float(counts.max() / counts.mean()) if counts.any() else 1.0,
        checkpoint_ragged=ragged,
        checkpoint_padded=padded,
        temporal_int8=temporal_int8,
        checkpoint_int8=checkpoint_int8,
        int8_alone_temporal=_ratio(dense.temporal, quantized.temporal),
        int8_alone_checkpoint=_ratio(dense.total, quantized.total),
        placements=tuple(_placed(plan, config, tp, kind, itemsize) for kind in PLACEMENTS),
    )


def _placed(
    plan: RetentionPlan, config: ModelConfig, tp: int, kind: PlacementKind, itemsize: int
) -> Placed:
    if kind == "hybrid":
        plan = permute_plan(plan, head_order(plan, config.linear, tp))
    counts = kept_per_rank(plan, tp)
    storage = balance_storage(counts)
    units = int(counts.max()) if kind == "off" else storage.slot_units
    dense = dense_bytes(config, itemsize=itemsize).total

    def capacity(dtype: CheckpointDtype) -> float:
        rows = units * plan.horizons.rows
        return _ratio(dense, slot_bytes(config, rows, tp, dtype, itemsize).total)

    return Placed(
        placement=kind,
        rank_units=tuple(counts.tolist()),
        slot_units=units,
        remote_units=0 if kind == "off" else storage.remote,
        capacity=capacity("float32"),
        capacity_int8=capacity("int8"),
    )


def _ratio(dense: int, compressed: int) -> float:
    return dense / compressed if compressed else float("inf")


def finite(value: Any) -> Any:
    """None for every infinite number, such as a ratio to nothing: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
