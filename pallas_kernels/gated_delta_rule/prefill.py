"""Prefill of a packed ragged batch by two kernels: tiles prepared in parallel, then scanned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ..ragged import Segments, make_tile_ranges
from .prepare import prepare
from .scan import scan
from .tuning import PrefillTuning


def ragged_prefill(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    layer: int | Array,
    segments: Segments,
    *,
    tuning: PrefillTuning | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`ragged_gated_delta_rule` as kernels; the pool is updated in place when donated."""
    tuning = tuning or PrefillTuning.default(v.dtype)
    tiles = make_tile_ranges(segments.cu, v.shape[0], tuning.chunk)
    prepared = prepare(q, k, v, g, beta, tiles, tuning, interpret=interpret)
    out = jax.ShapeDtypeStruct(v.shape, v.dtype)
    return scan(prepared, pool, layer, segments, tiles, out, tuning, interpret=interpret)


def supported(v: Array, key_dim: int) -> bool:
    """Whether the kernels cover these inputs: products of blocks of at least 16, no float64."""
    fits = all(dim % 16 == 0 and dim <= 256 for dim in (key_dim, v.shape[-1]))
    return fits and v.dtype in (jnp.bfloat16, jnp.float32)
