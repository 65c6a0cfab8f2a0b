"""(I + A)^-1 of a strictly lower triangular tile, inside a kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import Dot, barrier, iota


def halving_mask(size: int, level: int) -> Array:
    """Pairs (i, j) of one block of 2^(level+1), i in its upper half and j in its lower."""
    i = lax.shift_right_logical(iota((size, size), 0), jnp.int32(level))
    j = lax.shift_right_logical(iota((size, size), 1), jnp.int32(level))
    return ((i & 1) == 1) & (j == i - 1)


def unit_lower_inverse(
    a: Array, work_ref: Any, cell: tuple[Array, Array], leaf: int, dot: Dot
) -> Array:
    """Diagonal blocks of `leaf` rows by substitution, then doubled by block elimination.

    Both are exact formulas that stay small for repeated keys, where a product of powers of A
    does not. For the substitution a thread owns a column of its block's inverse, and every other
    layout would exchange rows between threads at each of its steps; so A goes there, and the
    blocks come back, through `work_ref[cell]` [C, C].
    """
    size = a.shape[0]
    whole = (*cell, pl.ds(0, size), pl.ds(0, size))
    work_ref[whole] = a.astype(work_ref.dtype)
    barrier(dot.interpret)
    column = iota((size,), 0)
    first = column // leaf * leaf  # row of the block of each column
    rows: list[Array] = []
    for i in range(leaf):
        x = jnp.where(column - first == i, 1.0, 0.0)
        for m, known in enumerate(rows):
            factor = plt.load(work_ref.at[(*cell, first + i, first + m)])
            x = x - factor.astype(jnp.float32) * known
        rows.append(x)
    barrier(dot.interpret)
    for i, x in enumerate(rows):
        plt.store(work_ref.at[(*cell, first + i, column)], x.astype(work_ref.dtype))
    barrier(dot.interpret)
    same_leaf = iota((size, size), 0) // leaf == iota((size, size), 1) // leaf
    inverse = plt.load(work_ref.at[whole], mask=same_leaf, other=0.0).astype(jnp.float32)
    for level in range(leaf.bit_length() - 1, size.bit_length() - 1):
        below = jnp.where(halving_mask(size, level), a, 0.0)
        inverse = inverse - dot(inverse, dot(below, inverse))
    return inverse
