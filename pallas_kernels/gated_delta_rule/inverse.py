"""(I + A)^-1 of a strictly lower triangular tile, inside a kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..triton import Dot, iota


def halving_mask(size: int, level: int) -> Array:
    """Pairs (i, j) of one block of 2^(level+1), i in its upper half and j in its lower."""
    i = lax.shift_right_logical(iota((size, size), 0), jnp.int32(level))
    j = lax.shift_right_logical(iota((size, size), 1), jnp.int32(level))
    return ((i & 1) == 1) & (j == i - 1)


def unit_lower_inverse(a: Array, leaf: int, dot: Dot) -> Array:
    """Diagonal blocks of `leaf` rows by substitution, then doubled by block elimination.

    Both are exact formulas that stay small for repeated keys, where a product of powers of A
    does not. Substitution costs no matrix product; the 2 log2(size / leaf) products of the
    doubling are what a larger leaf saves.
    """
    size = a.shape[0]
    inverse = _leaves(a, leaf)
    for level in range(leaf.bit_length() - 1, size.bit_length() - 1):
        below = jnp.where(halving_mask(size, level), a, 0.0)
        inverse = inverse - dot(inverse, dot(below, inverse))
    return inverse


def _leaves(a: Array, leaf: int) -> Array:
    """The inverses of all diagonal blocks at once, as [n, row, column]; zeros elsewhere."""
    size = a.shape[0]
    if leaf == 1:
        return jnp.where(iota((size, size), 0) == iota((size, size), 1), 1.0, 0.0)
    n = size // leaf
    four = (n, leaf, n, leaf)
    diagonal = iota(four, 0) == iota(four, 2)
    blocks = jnp.sum(jnp.where(diagonal, a.reshape(four), 0.0), axis=2)
    transposed = jnp.transpose(blocks, (0, 2, 1))  # so that a row of A lies along the rows of X
    row, column = iota((n, leaf, leaf), 1), iota((n, leaf, leaf), 2)
    x = jnp.where(row == column, 1.0, 0.0)
    for i in range(1, leaf):
        factors = jnp.sum(jnp.where(column == i, transposed, 0.0), axis=2)  # A[i, :], 0 from i on
        known = jnp.sum(factors[:, :, None] * x, axis=1)
        x = jnp.where(row == i, x - known[:, None, :], x)
    wide = jnp.where(diagonal, jnp.broadcast_to(x[:, :, None, :], four), 0.0)
    return wide.reshape(size, size)
