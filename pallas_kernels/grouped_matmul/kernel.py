"""The grouped product as one kernel: a program a (block of columns, tile of rows of one group).

There are as many tiles as any sizes of the groups could need, and those not needed end at once.
Each program finds its own rows: a list of tiles made before would take several small kernels,
longer than one token's products. Where rows are few there is a program for each, which is given the
group of its row, and asks for the group's matrix one load after its start; elsewhere they count
sizes. Tiles of one group follow each other, so that its matrix is read from memory once and then
from the cache; a group without rows has no tile, and its matrix is not read. Every element is one
sum in order of the inner axis.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ..triton import Dot, dividing_block, iota, triton_call
from .reference import Combine
from .tuning import MatmulTuning


class _Tile(NamedTuple):
    """Rows behind each other, of one group or (its number is that of the groups) of none."""

    start: Array  # the first
    valid: Array  # [rows] which of those from there on are the tile's
    group: Array


def _tile_of_row(groups_ref: Any, row: Array, rows: int) -> tuple[_Tile, Array]:
    """The tile from a row on, and whether there is one: every `rows` rows of a group."""
    count = groups_ref.shape[0]
    group, previous = groups_ref[row], groups_ref[jnp.maximum(row - 1, 0)]
    inside = row + iota((rows,), 0) < count
    groups = plt.load(groups_ref.at[pl.ds(row, rows)], mask=inside, other=-1)

    def counted() -> Array:
        wide = pl.next_power_of_2(count)
        before = plt.load(groups_ref.at[pl.ds(0, wide)], mask=iota((wide,), 0) < row, other=-1)
        return row - jnp.sum((before == group).astype(jnp.int32))

    # Few programs count: most rows are the first of their group.
    first = lax.cond((row == 0) | (previous != group), lambda: row, counted)
    begins = lax.rem(row - first, jnp.int32(rows)) == 0
    return _Tile(row, groups == group, group), begins


def _tile_of_sizes(sizes_ref: Any, tile: Array, rows: int, count: int) -> tuple[_Tile, Array]:
    """And how many rows are valid: tile by tile, group by group. Behind the last group come tiles
    of the rows that belong to none, and then empty ones."""
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
    here = jnp.clip(size - offset, 0, rows)
    return _Tile(begin + offset, iota((rows,), 0) < here, group), here


def _kernel(
    tiles_ref: Any,
    *refs: Any,
    tuning: MatmulTuning,
    by_row: bool,
    combine: Combine | None,
    interpret: bool,
) -> None:
    """`tiles_ref` is the group of each row, or the size of each group."""
    *index_refs, x_ref, w_ref, y_ref = refs
    block, number = pl.program_id(0), pl.program_id(1)
    groups, matrices = w_ref.shape[:2]
    columns = pl.ds(block * tuning.columns, tuning.columns)
    dot = Dot(tuning.products, interpret)

    def multiply(tile: _Tile) -> None:
        (size,) = tile.valid.shape
        here = pl.ds(tile.start, size)
        source = tile.start + iota((size,), 0)
        if index_refs:
            source = plt.load(index_refs[0].at[here], mask=tile.valid, other=0)
        shape = (size, tuning.inner)
        source = jnp.broadcast_to(jnp.where(tile.valid, source, 0)[:, None], shape)
        mask = jnp.broadcast_to(tile.valid[:, None], shape)
        zero = jnp.zeros((), x_ref.dtype)

        def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            first = step * tuning.inner
            inner = pl.ds(first, tuning.inner)
            # The matrices first: nothing is waited for before they can be asked for.
            ws = [w_ref[tile.group, n, columns, inner] for n in range(matrices)]
            x = plt.load(x_ref.at[source, first + iota(shape, 1)], mask=mask, other=zero)
            return tuple(s + dot(x, w, tb=True) for s, w in zip(sums, ws, strict=True))

        sums = tuple(jnp.zeros((size, tuning.columns), jnp.float32) for _ in range(matrices))
        sums = lax.fori_loop(0, w_ref.shape[3] // tuning.inner, add, sums)
        y = sums[0] if combine is None else combine(*sums)
        plt.store(y_ref.at[here, columns], y.astype(y_ref.dtype), mask=tile.valid[:, None])

    def nothing(tile: _Tile) -> None:
        zeros = jnp.zeros((tuning.rows, tuning.columns), y_ref.dtype)
        here = pl.ds(tile.start, tuning.rows)
        plt.store(y_ref.at[here, columns], zeros, mask=tile.valid[:, None])

    if by_row:
        tile, begins = _tile_of_row(tiles_ref, number, tuning.rows)
        pl.when(begins & (tile.group < groups))(functools.partial(multiply, tile))
        pl.when(begins & (tile.group >= groups))(functools.partial(nothing, tile))
        return
    tile, valid = _tile_of_sizes(tiles_ref, number, tuning.rows, y_ref.shape[0])
    half = tuning.rows // 2
    heights = ((half, 0, half), (tuning.rows, half, tuning.rows))
    for height, above, most in heights if tuning.halve else ((tuning.rows, 0, tuning.rows),):
        wanted = (tile.group < groups) & (valid > above) & (valid <= most)
        short = tile._replace(valid=iota((height,), 0) < valid)
        pl.when(wanted)(functools.partial(multiply, short))
    pl.when(tile.group >= groups)(functools.partial(nothing, tile))


def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    rows: Array | None = None,
    groups: Array | None = None,
    combine: Combine | None = None,
    dtype: DTypeLike | None = None,
    tuning: MatmulTuning | None = None,
    interpret: bool = False,
) -> Array:
    count = (x if rows is None else rows).shape[0]
    w = w.reshape(w.shape[0], -1, *w.shape[-2:])
    number, matrices, outputs, inner = w.shape
    tuning = tuning or MatmulTuning.default(count, number, matrices, x.dtype)
    tuning = replace(
        tuning,
        columns=dividing_block(outputs, tuning.columns // matrices),
        inner=dividing_block(inner, tuning.inner),
    )
    by_row = count <= number
    tiles = count if by_row else min(count, pl.cdiv(count, tuning.rows) + number + 1)
    if by_row and groups is None:
        groups = _group_of_rows(group_sizes, count)
    call = triton_call(
        functools.partial(
            _kernel, tuning=tuning, by_row=by_row, combine=combine, interpret=interpret
        ),
        "grouped_matmul",
        (outputs // tuning.columns, tiles),
        (jax.ShapeDtypeStruct((count, outputs), jnp.float32 if dtype is None else dtype),),
        warps=tuning.warps,
        stages=tuning.stages,
        interpret=interpret,
    )
    index = [] if rows is None else [rows]
    (y,) = call(groups if by_row else group_sizes, *index, x, w)
    return y


def _group_of_rows(sizes: Array, count: int) -> Array:
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    row = jnp.arange(count, dtype=jnp.int32)
    return jnp.sum(ends <= row[:, None], axis=1, dtype=jnp.int32)


def supported(x: Array, w: Array) -> bool:
    """Products of blocks of at least 16, in bfloat16 or float32."""
    fits = all(width % 16 == 0 for width in w.shape[-2:])
    return fits and x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float32)
