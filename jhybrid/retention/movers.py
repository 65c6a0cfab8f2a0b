"""Checkpoints between native slots and the compressed pool, on every rank at once.

These run inside shard_map over `tp`: a rank packs the kept rows of its heads, and where storage is
balanced (dasc section 4.3) the surplus goes to other ranks in one all-to-all. Load is the inverse.
Slots and rows are data; a batch has a fixed size, and a pair with a negative slot does nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int32

from pallas_kernels import PackedStates, pack_states, unpack_states
from pallas_kernels.ragged import or_outside
from pallas_kernels.ragged_pack import Omitted
from pallas_kernels.triton import Implementation

from ..batch import Caches
from ..config import ModelConfig
from ..models.specs import cache_specs
from ..params import ParamSpec
from ..sharding import AXIS
from .maps import MoveMaps
from .ratios import CheckpointDtype, row_bytes


@struct.dataclass
class CompressedPool:
    """C slots of kept rows, and the conv windows of all layers as they are."""

    states: PackedStates  # values [C, R, V] and scales [C, R] on each rank
    conv: Float[Array, "C Ll W C"]


def compressed_specs(
    config: ModelConfig, maps: MoveMaps, slots: int, dtype: CheckpointDtype
) -> Any:
    """The compressed pool with a ParamSpec at every leaf: shapes, shardings, bytes, zeros."""
    tp, width = maps.rows.shape
    rows, axis = tp * width, "value_heads"  # each rank's rows, end to end
    shape = (slots, rows, config.linear.value_dim)
    values: Any = ParamSpec(shape, (None, axis, None), "zeros", dtype=jnp.dtype(dtype))
    scales: Any = ParamSpec((slots, rows), (None, axis), "zeros", dtype=jnp.float32)
    states = PackedStates(values, scales if dtype == "int8" else None)
    return CompressedPool(states=states, conv=cache_specs(config, 1, 1, slots).conv)


def scratch_bytes(config: ModelConfig, maps: MoveMaps, moves: int, dtype: CheckpointDtype) -> int:
    """What a call of `moves` pairs holds beside the pools, over all ranks: the rows that travel, as
    they leave and as they arrive. All else goes from pool to pool."""
    if maps.exchange is None:
        return 0
    ranks, rows = maps.exchange.send.shape
    return 2 * moves * ranks * rows * row_bytes(config.linear.value_dim, dtype)


def store(
    caches: Caches,
    pool: CompressedPool,
    maps: MoveMaps,
    source: Int32[Array, " B"],
    target: Int32[Array, " B"],
    *,
    implementation: Implementation | None = None,
) -> CompressedPool:
    """The checkpoints in native slots `source` packed into compressed slots `target`."""
    options: Any = {"implementation": implementation}
    states = pack_states(caches.recurrent, pool.states, maps.rows[0], source, target, **options)
    if maps.exchange is not None:
        send, receive = maps.exchange.send[0], maps.exchange.receive[0]
        staging = _staging(pool.states, source.shape[0], send.shape[0])
        staging = pack_states(caches.recurrent, staging, send, source, _each(source), **options)
        slots = jnp.where(source >= 0, target, -1)
        states = _put_rows(states, slots, receive, _all_to_all(staging))
    return replace(pool, states=states, conv=_copy_slots(caches.conv, pool.conv, source, target))


def load(
    caches: Caches,
    pool: CompressedPool,
    maps: MoveMaps,
    source: Int32[Array, " B"],
    target: Int32[Array, " B"],
    *,
    omitted: Omitted = "zero",
    implementation: Implementation | None = None,
) -> Caches:
    """Compressed slots `source` restored into native slots `target`, conv windows included.

    Omitted units become zero (dasc-nr), or keep what the native slot holds.
    """
    options: Any = {"implementation": implementation}
    recurrent = unpack_states(
        pool.states,
        caches.recurrent,
        maps.rows[0],
        source,
        target,
        omitted=omitted,
        positions=maps.positions[0],
        **options,
    )
    if maps.exchange is not None:
        send, receive = maps.exchange.send[0], maps.exchange.receive[0]
        staging = _all_to_all(_take_rows(pool.states, source, receive))
        recurrent = unpack_states(
            staging, recurrent, send, _each(source), target, omitted="keep", **options
        )
    conv = _copy_slots(pool.conv, caches.conv, source, target)
    return replace(caches, recurrent=recurrent, conv=conv)


def _each(slots: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Number b for pair b of a batch, -1 for a pair without a source."""
    return jnp.where(slots >= 0, jnp.arange(slots.shape[0], dtype=jnp.int32), -1)


def _staging(like: PackedStates, slots: int, rows: int) -> PackedStates:
    values = jnp.zeros((slots, rows, like.values.shape[2]), like.values.dtype)
    scales = None if like.scales is None else jnp.zeros((slots, rows), like.scales.dtype)
    return PackedStates(values, scales)


def _all_to_all(states: PackedStates) -> PackedStates:
    """Block j of every rank's rows goes to rank j; the blocks that arrive are in rank order."""
    return jax.tree.map(lambda x: lax.all_to_all(x, AXIS, 1, 1, tiled=True), states)


def _put_rows(states: PackedStates, slots: Array, rows: Array, new: PackedStates) -> PackedStates:
    """`states` with `new` [B, N, ...] at [slots[b], rows]; negative ones are dropped."""
    count, width = states.values.shape[:2]
    at = or_outside(slots, count)[:, None], or_outside(rows, width)

    def put(x: Array, y: Array) -> Array:
        return x.at[at].set(y, mode="drop", unique_indices=True)

    scales = None
    if states.scales is not None and new.scales is not None:
        scales = put(states.scales, new.scales)
    return PackedStates(put(states.values, new.values), scales)


def _take_rows(states: PackedStates, slots: Array, rows: Array) -> PackedStates:
    """Rows [B, N, ...] of slots; what negative numbers give is never used."""
    at = jnp.maximum(slots, 0)[:, None], jnp.maximum(rows, 0)
    scales = None if states.scales is None else states.scales[at]
    return PackedStates(states.values[at], scales)


def _copy_slots(source_pool: Array, pool: Array, source: Array, target: Array) -> Array:
    """`pool` with whole slots of `source_pool` in it; negative slots on either side: nothing."""
    at = or_outside(jnp.where(source >= 0, target, -1), pool.shape[0])
    rows = source_pool[jnp.maximum(source, 0)]
    return pool.at[at].set(rows, mode="drop", unique_indices=True)
