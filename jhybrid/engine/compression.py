"""What an engine needs for compressed checkpoints, made once when the weights are loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..models.specs import ModelParams
from ..params import count_bytes
from ..retention.maps import MoveMaps
from ..retention.movers import compressed_specs, scratch_bytes
from ..retention.permutation import permute_params
from ..retention.plan_file import stored_or_selected
from ..retention.prepare import prepare
from ..retention.ratios import CheckpointDtype, finite, plan_ratios
from ..retention.selection import RetentionPlan
from .buckets import MOVES
from .config import EngineConfig


@dataclass(frozen=True, eq=False)
class Compression:
    """`window`: tokens of the longest refresh (max W_u of dasc eq. 7). `slot_bytes` of one
    compressed slot and `scratch_bytes` of one call of the movers, over all ranks. `lossless`:
    restored states are the ones that were stored.
    """

    maps: MoveMaps  # numpy, [P, ...]
    dtype: CheckpointDtype
    window: int
    slot_bytes: int
    scratch_bytes: int
    lossless: bool
    facts: dict[str, Any]  # of the plan, for /server_info


def compress(
    params: ModelParams,
    config: ModelConfig,
    engine: EngineConfig,
    dtype: Any,
    folder: Path | None = None,
) -> tuple[ModelParams, Compression | None]:
    """The plan stored in the model's folder, or the one that its horizons give, placed over ranks.

    Hybrid placement reorders the heads of the parameters. None without a compressed pool.
    """
    if engine.w_max is None:
        return params, None
    plan = stored_or_selected(folder, params, config, engine.w_max, engine.a_s)
    return apply_plan(plan, params, config, engine, dtype)


def apply_plan(
    plan: RetentionPlan, params: ModelParams, config: ModelConfig, engine: EngineConfig, dtype: Any
) -> tuple[ModelParams, Compression]:
    """Compression by a given plan."""
    prepared = prepare(plan, config, engine.tp, layout=engine.layout, placement=engine.placement)
    if prepared.order is not None:
        params = permute_params(params, config, prepared.order)
    maps, kind = prepared.maps, engine.checkpoint_dtype
    slot = count_bytes(compressed_specs(config, maps, 1, kind), dtype)
    scratch = scratch_bytes(config, maps, MOVES, kind)
    ratios = asdict(plan_ratios(plan, config, engine.tp, dtype.itemsize))
    compression = Compression(
        maps=maps,
        dtype=kind,
        window=plan.replay_window,
        slot_bytes=slot,
        scratch_bytes=scratch,
        lossless=bool(plan.keep.all()) and engine.checkpoint_dtype == "float32",
        facts={
            "rule": plan.rule,
            "a_s": plan.horizons.gate_input,
            "weights": plan.horizons.digest,
            "replay_window": plan.replay_window,
            "slot_bytes": slot,
            "scratch_bytes": scratch,
            **finite(ratios),
        },
    )
    return params, compression
