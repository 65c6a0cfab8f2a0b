"""The grouped product as one kernel: a program a (block of columns, tile of rows of one group).

There are as many tiles as any sizes of the groups could need, and those not needed end at once.
Each program finds its own rows from the sizes: a list of tiles made before would take several
small kernels, longer than one token's products. Tiles of one group follow each other, so that its
matrix is read from memory once and then from the cache; a group without rows has no tile, and its
matrix is not read. Every element is one sum in order of the inner axis.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ..triton import Dot, dividing_block, iota, triton_call
from .reference import Combine
from .tuning import MatmulTuning


def _find_tile(sizes_ref: Any, tile: Array, rows: int, count: int) -> tuple[Array, Array, Array]:
    """(first row, number of rows, group) of a tile. Behind the last group come tiles of the rows
    that belong to none, whose group is the number of groups, and then empty ones."""
    groups = sizes_ref.shape[0]
    wide = pl.next_power_of_2(groups)
    index = iota((wide,), 0)
    sizes = plt.load(sizes_ref.at[pl.ds(0, wide)], mask=index < groups, other=0)
    tiles = (sizes + (rows - 1)) // rows
    group = jnp.sum((jnp.cumsum(tiles) <= tile).astype(jnp.int32))
    group = jnp.minimum(group, groups)
    before = index < group
    begin = jnp.sum(jnp.where(before, sizes, 0))
    offset = (tile - jnp.sum(jnp.where(before, tiles, 0))) * rows
    size = jnp.sum(jnp.where(index == group, sizes, 0))
    size = jnp.where(group < groups, size, count - begin)
    return begin + offset, jnp.clip(size - offset, 0, rows), group


def _kernel(
    sizes_ref: Any,
    *refs: Any,
    tuning: MatmulTuning,
    combine: Combine | None,
    interpret: bool,
) -> None:
    *index_refs, x_ref, w_ref, y_ref = refs
    block, tile = pl.program_id(0), pl.program_id(1)
    start, rows, group = _find_tile(sizes_ref, tile, tuning.rows, y_ref.shape[0])
    groups, matrices = w_ref.shape[:2]
    columns = pl.ds(block * tuning.columns, tuning.columns)
    dot = Dot(tuning.products, interpret)

    def multiply(size: int) -> None:
        """A tile of `size` rows."""
        here = pl.ds(start, size)
        valid = iota((size,), 0) < rows
        source = start + iota((size,), 0)
        if index_refs:
            source = plt.load(index_refs[0].at[here], mask=valid, other=0)
        shape = (size, tuning.inner)
        source = jnp.broadcast_to(jnp.where(valid, source, 0)[:, None], shape)
        mask = jnp.broadcast_to(valid[:, None], shape)
        zero = jnp.zeros((), x_ref.dtype)

        def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            first = step * tuning.inner
            x = plt.load(x_ref.at[source, first + iota(shape, 1)], mask=mask, other=zero)
            inner = pl.ds(first, tuning.inner)
            ws = [w_ref[group, n, columns, inner] for n in range(matrices)]
            return tuple(s + dot(x, w, tb=True) for s, w in zip(sums, ws, strict=True))

        sums = tuple(jnp.zeros((size, tuning.columns), jnp.float32) for _ in range(matrices))
        sums = lax.fori_loop(0, w_ref.shape[3] // tuning.inner, add, sums)
        y = sums[0] if combine is None else combine(*sums)
        plt.store(y_ref.at[here, columns], y.astype(y_ref.dtype), mask=valid[:, None])

    half = tuning.rows // 2
    sizes = ((half, 0, half), (tuning.rows, half, tuning.rows))
    for size, above, most in sizes if tuning.halve else ((tuning.rows, 0, tuning.rows),):
        wanted = (group < groups) & (rows > above) & (rows <= most)
        pl.when(wanted)(functools.partial(multiply, size))

    @pl.when(group >= groups)
    def _() -> None:  # rows behind the last group
        valid = (iota((tuning.rows,), 0) < rows)[:, None]
        zeros = jnp.zeros((tuning.rows, tuning.columns), y_ref.dtype)
        plt.store(y_ref.at[pl.ds(start, tuning.rows), columns], zeros, mask=valid)


def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    rows: Array | None = None,
    combine: Combine | None = None,
    dtype: DTypeLike | None = None,
    tuning: MatmulTuning | None = None,
    interpret: bool = False,
) -> Array:
    count = (x if rows is None else rows).shape[0]
    w = w.reshape(w.shape[0], -1, *w.shape[-2:])
    groups, matrices, outputs, inner = w.shape
    tuning = tuning or MatmulTuning.default(count, groups, x.dtype)
    tuning = replace(
        tuning,
        columns=dividing_block(outputs, tuning.columns // matrices),
        inner=dividing_block(inner, tuning.inner),
    )
    number = min(count, pl.cdiv(count, tuning.rows) + groups + 1)
    call = triton_call(
        functools.partial(_kernel, tuning=tuning, combine=combine, interpret=interpret),
        "grouped_matmul",
        (outputs // tuning.columns, number),
        (jax.ShapeDtypeStruct((count, outputs), jnp.float32 if dtype is None else dtype),),
        warps=tuning.warps,
        stages=tuning.stages,
        interpret=interpret,
    )
    index = [] if rows is None else [rows]
    (y,) = call(group_sizes, *index, x, w)
    return y


def supported(x: Array, w: Array) -> bool:
    """Products of blocks of at least 16, in bfloat16 or float32."""
    fits = all(width % 16 == 0 for width in w.shape[-2:])
    return fits and x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float32)
