"""Grouped matrix product in plain XLA.

`jax.lax.ragged_dot` would do, but outside of TPUs it becomes a dense product over all groups:
E times the work, a transposed copy of all weights, and sums whose order depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from ..ragged import make_tiles, owner

SMALLEST_TILE, LARGEST_TILE = 8, 64
TILES_AT_ONCE = 16  # bounds the copies of weights that are alive

Combine = Callable[[Array, Array], Array]


def grouped_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "E N K"],
    group_sizes: Int32[Array, " E"],
    *,
    rows: Int32[Array, " M"] | None = None,
    combine: Combine | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "M Nc"]:
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)])
    x = x if rows is None else x[rows]
    y = _each_row(x, w, cu) if x.shape[0] <= w.shape[0] else _tiled(x, w, cu)
    if combine is not None:
        y = combine(*jnp.split(y, 2, axis=1))
    inside = jnp.arange(x.shape[0], dtype=jnp.int32) < cu[-1]
    return jnp.where(inside[:, None], y, 0).astype(y.dtype if dtype is None else dtype)


def _each_row(x: Array, w: Array, cu: Array) -> Array:
    """Few rows: each reads the matrix of its own group, and no other is read.

    A product and a sum, which XLA fuses with the gather; a dot would copy the matrices first.
    """
    work = _accumulator(x)
    chosen = w[owner(cu, x.shape[0])]
    return jnp.sum(x[:, None, :].astype(work) * chosen.astype(work), axis=-1)


def _tiled(x: Array, w: Array, cu: Array) -> Array:
    """Many rows: tiles that do not cross a group, each times one matrix."""
    rows, groups = x.shape[0], w.shape[0]
    tile = SMALLEST_TILE
    while tile < min(LARGEST_TILE, rows // groups):
        tile *= 2
    tiles = make_tiles(cu, rows, tile)

    def one(cells: tuple[Array, Array]) -> Array:
        tokens, group = cells
        return lax.dot_general(
            x[tokens],
            w[group],
            (((1,), (1,)), ((), ())),
            preferred_element_type=_accumulator(x),
        )

    # Whole batches of tiles: a remainder would be compiled, and run, as a second loop.
    count = tiles.segment.shape[0]
    at_once = min(TILES_AT_ONCE, count)
    more = -count % at_once
    tokens, group = jnp.pad(tiles.tokens, ((0, more), (0, 0))), jnp.pad(tiles.segment, (0, more))
    cells = lax.map(one, (tokens, group), batch_size=at_once)
    return cells.reshape(-1, w.shape[1])[tiles.cell_of_token]


def _accumulator(x: Array) -> DTypeLike:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
