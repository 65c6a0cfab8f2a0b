"""The grouped product as one kernel: a program a (block of columns, tile of rows of one group).

Which rows a tile holds and whose they are is data, computed on the device: there are as many tiles
as any sizes of the groups could need, and those not needed end at once. Tiles of one group follow
each other, so that its matrix is read from memory once and then from the cache; a group without
rows has no tile, and its matrix is not read. Every element is one sum in order of the inner axis.
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

from ..ragged import make_tile_ranges, owner
from ..triton import Dot, dividing_block, iota, triton_call
from .reference import Combine
from .tuning import MatmulTuning


def _kernel(
    start_ref: Any,
    rows_ref: Any,
    group_ref: Any,
    *refs: Any,
    tuning: MatmulTuning,
    combine: Combine | None,
    interpret: bool,
) -> None:
    *index_refs, x_ref, w_ref, y_ref = refs
    block, tile = pl.program_id(0), pl.program_id(1)
    start, rows, group = start_ref[tile], rows_ref[tile], group_ref[tile]
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
    count, groups = (x if rows is None else rows).shape[0], w.shape[0]
    matrices = 1 if combine is None else 2
    outputs = w.shape[1] // matrices
    tuning = tuning or MatmulTuning.default(count, groups, x.dtype)
    tuning = replace(
        tuning,
        columns=dividing_block(outputs, tuning.columns // matrices),
        inner=dividing_block(w.shape[2], tuning.inner),
    )
    cu = jnp.pad(jnp.cumsum(group_sizes, dtype=jnp.int32), (1, 1), constant_values=(0, count))
    tiles = make_tile_ranges(cu, count, tuning.rows)
    number = tiles.start.shape[0]
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
    parts = w.reshape(groups, matrices, outputs, w.shape[2])
    (y,) = call(tiles.start, tiles.rows, owner(tiles.of_segment, number), *index, x, parts)
    return y


def supported(x: Array, w: Array, combine: Combine | None) -> bool:
    """Products of blocks of at least 16, in bfloat16 or float32."""
    outputs = w.shape[1] // (1 if combine is None else 2)
    fits = outputs % 16 == 0 and w.shape[2] % 16 == 0
    return fits and x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float32)
