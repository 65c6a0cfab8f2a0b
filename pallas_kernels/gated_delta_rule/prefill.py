"""Prefill of a packed ragged batch by two kernels: tiles prepared in parallel, then scanned."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..ragged import Segments, make_tile_ranges, owner
from .inputs import Activation, Gates
from .prepare import prepare
from .scan import scan
from .tile import Options
from .tuning import PrefillTuning


def ragged_prefill(
    qkv: Array,
    gates: Gates,
    pool: Array,
    layers: Array,
    gate_sets: Array | None,
    segments: Segments,
    activation: Activation,
    *,
    outputs: bool = True,
    sequences: int | None = None,
    tuning: PrefillTuning | None = None,
    interpret: bool = False,
) -> tuple[Array | None, Array]:
    """Outputs, unless only states are asked for, and the pool: updated in place when donated.

    `layers` [G]: the layer of the pool, and `gate_sets` [G]: the row of the gates' parameters
    that each segment uses (None: the first). `sequences`: see `api.ragged_gated_delta_rule`.
    """
    heads, key_dim, value_dim = pool.shape[2:]
    if tuning is None:
        columns = (sequences or segments.load.shape[0]) * heads * value_dim
        tuning = PrefillTuning.default(qkv.dtype, gates.decay.ndim == 3, columns)
    options = Options(key_dim, value_dim, activation, tuning, outputs, interpret)
    tiles = make_tile_ranges(segments.cu, qkv.shape[0], tuning.chunk)
    gate_set = jnp.zeros_like(tiles.start)
    if gate_sets is not None:
        gate_set = gate_sets[owner(tiles.of_segment, tiles.start.shape[0])]
    prepared = prepare(qkv, gates, gate_set, tiles, options)
    return scan(prepared, qkv, pool, layers, segments, tiles, options)


def supported(dtype: DTypeLike, key_dim: int, value_dim: int) -> bool:
    """Whether the kernels cover these inputs: products of blocks of at least 16, no float64."""
    fits = all(dim % 16 == 0 and dim <= 256 for dim in (key_dim, value_dim))
    return fits and dtype in (jnp.bfloat16, jnp.float32)
