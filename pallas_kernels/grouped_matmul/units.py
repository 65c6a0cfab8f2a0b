"""Which tiles the Hopper kernel computes, in order, listed by one small kernel from the sizes.

A group's rows are cut into equal pieces, as few as there can be, so that blocks of threads have
units of about one length, and few rows are multiplied in vain. Pieces that share columns of the
group's matrix follow each other: it is read from memory once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import iota, triton_call

ALIGNED = 8  # groups begin at multiples of it: rows of shared memory that are swizzled together
LINES = 64  # columns that the tensor cores multiply at a time, and that are stored together
FIELDS = 5
AT_ONCE = 64  # units that a program of the list stores together


class Unit(NamedTuple):
    """Rows of one group, and a tile of columns. `height` is that of the group's pieces."""

    group: Array
    row: Array  # the first
    rows: Array
    column: Array  # number of the tile of columns
    height: Array

    @classmethod
    def read(cls, units_ref: Any, number: Array) -> Unit:
        return cls(*(units_ref[number * FIELDS + field] for field in range(FIELDS)))


def list_units(
    sizes: Array, rows: int, columns: int, tallest: int, *, interpret: bool = False
) -> tuple[Array, Array]:
    """(number of units and of rows in groups [2], the units' fields behind each other)."""
    groups = sizes.shape[0]
    most = columns * (rows // tallest + min(rows, groups))
    kernel = functools.partial(_kernel, columns=columns, tallest=tallest)
    out = tuple(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (2, most * FIELDS))
    call = triton_call(kernel, "list_units", (groups,), out, warps=1, interpret=interpret)
    head, units = call(sizes)
    return head, units


def _kernel(sizes_ref: Any, head_ref: Any, units_ref: Any, *, columns: int, tallest: int) -> None:
    group, groups = pl.program_id(0), sizes_ref.shape[0]
    wide = pl.next_power_of_2(groups)
    index = iota((wide,), 0)
    sizes = plt.load(sizes_ref.at[pl.ds(0, wide)], mask=index < groups, other=0)
    pieces = lax.div(sizes + (tallest - 1), tallest)

    def total(values: Array, mask: Array) -> Array:
        return jnp.sum(jnp.where(mask, values, 0))

    before, here = index < group, index == group
    first, count = columns * total(pieces, before), total(pieces, here)
    row, size = total(sizes, before), total(sizes, here)
    part = jnp.maximum(count, 1)
    height = lax.div(size + part * ALIGNED - 1, part * ALIGNED) * ALIGNED

    def some(step: Array, _: None) -> None:
        number = step * AT_ONCE + iota((AT_ONCE,), 0)
        mask = number < columns * count
        start = lax.rem(number, part) * height
        fields = (group, row + start, jnp.clip(size - start, 0, height), number // part, height)
        for field, values in enumerate(fields):
            to = units_ref.at[(first + number) * FIELDS + field]
            plt.store(to, jnp.broadcast_to(values, (AT_ONCE,)), mask=mask)

    lax.fori_loop(0, pl.cdiv(columns * count, AT_ONCE), some, None)

    @pl.when(group == groups - 1)
    def _() -> None:
        place = iota((2,), 0)
        last = columns * (first // columns + count), row + size
        plt.store(head_ref.at[place], jnp.where(place == 0, *last))
