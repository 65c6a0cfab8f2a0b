"""Packing kept rows of recurrent states, in plain XLA.

A state [L, H, K, V] is N = L H K rows of V values. A value head keeps its K rows, a channel of a
(layer, head) is one row; so whatever is kept of a whole model is one list of rows.

int8 is symmetric with one scale a row: x ~ scale q, scale = max |x| / 127 (paper, appendix E).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, Int32

from ..ragged import or_outside

Omitted = Literal["zero", "keep"]


class PackedStates(NamedTuple):
    """C slots of R kept rows; int8 values have one scale a row, float32 values none."""

    values: Array  # [C, R, V] float32 or int8
    scales: Array | None  # [C, R] float32


def row_positions(rows: Int32[Array, " R"], count: int) -> Int32[Array, " N"]:
    """The inverse of `rows`: where each of `count` rows of a state is packed, -1 if it is not."""
    index = jnp.arange(rows.shape[0], dtype=jnp.int32)
    nowhere = jnp.full((count,), -1, jnp.int32)
    return nowhere.at[or_outside(rows, count)].set(index, mode="drop", unique_indices=True)


def quantise(x: Float32[Array, "*R V"]) -> tuple[Array, Float32[Array, " *R"]]:
    """(int8 values, scales); a row of zeros has scale 0."""
    scales = jnp.max(jnp.abs(x), axis=-1) / 127.0
    steps = x / jnp.where(scales > 0, scales, 1.0)[..., None]
    return jnp.floor(steps + 0.5).astype(jnp.int8), scales


def _both(source: Array, target: Array) -> Array:
    """Target slots, negative where either slot is."""
    return jnp.where(source >= 0, target, -1)


def _gather(x: Array, slots: Array, index: Array) -> Array:
    """x[slots, index], zeros where the index is negative. x is [S, N, ...].

    Behind a barrier, as in `gather_slots`: x may be the pool that is written next.
    """
    if x.shape[1] == 0:  # nothing is kept
        return jnp.zeros((slots.shape[0], index.shape[0], *x.shape[2:]), x.dtype)
    found = x[jnp.maximum(slots, 0)[:, None], jnp.maximum(index, 0)]
    keep = (index >= 0).reshape((1, -1) + (1,) * (found.ndim - 2))
    return jnp.where(keep, lax.optimization_barrier(found), jnp.zeros((), x.dtype))


def _scatter(x: Array, slots: Array, index: Array, values: Array) -> Array:
    """x with `values` at [slots, index]; what has a negative slot or index is dropped."""
    at = or_outside(slots, x.shape[0])[:, None], or_outside(index, x.shape[1])
    return x.at[at].set(values, mode="drop", unique_indices=True)


def _as_rows(pool: Float32[Array, "S L H K V"]) -> Float32[Array, "S N V"]:
    return pool.reshape(pool.shape[0], -1, pool.shape[-1])


def pack_states(
    pool: Float32[Array, "S L H K V"],
    packed: PackedStates,
    rows: Int32[Array, " R"],
    source: Int32[Array, " B"],
    target: Int32[Array, " B"],
) -> PackedStates:
    kept = _gather(_as_rows(pool), source, rows)
    slots = _both(source, target)
    index = jnp.arange(rows.shape[0], dtype=jnp.int32)
    if packed.scales is None:
        return PackedStates(_scatter(packed.values, slots, index, kept), None)
    values, scales = quantise(kept)
    return PackedStates(
        _scatter(packed.values, slots, index, values),
        _scatter(packed.scales, slots, index, scales),
    )


def unpack_states(
    packed: PackedStates,
    pool: Float32[Array, "S L H K V"],
    rows: Int32[Array, " R"],
    source: Int32[Array, " B"],
    target: Int32[Array, " B"],
    *,
    omitted: Omitted,
    positions: Int32[Array, " N"] | None = None,
) -> Float32[Array, "S L H K V"]:
    flat, slots = _as_rows(pool), _both(source, target)
    count = flat.shape[1]
    if omitted == "zero":
        take = row_positions(rows, count) if positions is None else positions
        put = jnp.arange(count, dtype=jnp.int32)
    else:
        take, put = jnp.arange(rows.shape[0], dtype=jnp.int32), rows
    values = _gather(packed.values, source, take).astype(jnp.float32)
    if packed.scales is not None:
        values = values * _gather(packed.scales, source, take)[..., None]
    return _scatter(flat, slots, put, values).reshape(pool.shape)
