"""Products of queries and keys under per-channel decay (KDA), inside a kernel.

    kk_ij = sum_c k_ic k_jc exp(g_{j+1,c} + ... + g_{i,c});   qk_ij likewise with q_i

A product of two matrices needs the exponential split into a factor of i and a factor of j. Cut at
a token between j and i both exponents are sums of log-decays and never positive, whatever the
decay; so the pairs are taken level by level, each level cut at its block borders (the i of a
pair in a block's upper half, its j in the lower).

Pairs nearer than a leaf would cost a level each. In a leaf of s rows the cut is the leaf's middle,
on the wrong side for some pairs, where the exponents reach s/2 log-decays above zero. There
log-decays are floored at -144 / s, so that no factor leaves the range of float32. A floored decay
is still below exp(-144 / s) in size: off by at most 1.3e-4 of the product of the vectors for
s = 16 (for bf16), and below float32 rounding for s <= 8. s = 1 floors nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..triton import Dot, iota
from .inverse import halving_mask

EXPONENT_LIMIT = 72.0  # exp(72) times a key, and its inverse, are normal in float32 and bf16


class Decayed(NamedTuple):
    """Queries and keys [C, Kb] with decays from the tile's start or to its end."""

    q_from_start: Array  # times exp(g_1 + ... + g_i)
    k_from_start: Array
    k_to_end: Array  # times exp(g_{i+1} + ... + g_C)


def _leaf_exponents(g: Array, leaf: int) -> tuple[Array, Array]:
    """Sums over each leaf up to and with a token, and behind it. [C, K]"""
    if leaf == 1:
        return g, jnp.zeros_like(g)
    blocks = g.reshape(-1, leaf, g.shape[1])
    upto = jnp.cumsum(blocks, axis=1)
    behind = jnp.sum(blocks, axis=1, keepdims=True) - upto
    return upto.reshape(g.shape), jnp.minimum(behind, 0.0).reshape(g.shape)


def _other_half(sums: Array, half: int, of: int, shape: tuple[int, ...]) -> Array:
    """exp(sums of blocks `of`) for the rows of the blocks' neighbours, 1 for the others. [C, K]"""
    pairs = sums.reshape(-1, 2, shape[1])
    which = iota(pairs.shape, 1)
    wanted = jnp.sum(jnp.where(which == of, pairs, 0.0), axis=1, keepdims=True)
    factors = jnp.exp(jnp.where(which == of, 0.0, wanted))
    spread = (pairs.shape[0], 2, half, shape[1])
    return jnp.broadcast_to(factors[:, :, None, :], spread).reshape(shape)


def _add_leaf_pairs(
    sums: tuple[Array, Array], q: Array, k: Array, g: Array, leaf: int, dot: Dot
) -> tuple[Array, Array]:
    kk, qk = sums
    size = k.shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    if leaf == 1:  # kk is not needed on the diagonal
        return kk, jnp.where(i == j, qk + jnp.sum(q * k, axis=1)[:, None], qk)
    blocks = jnp.maximum(g, -2 * EXPONENT_LIMIT / leaf).reshape(-1, leaf, g.shape[1])
    first_half = iota((size // leaf, leaf, g.shape[1]), 1) < leaf // 2
    middle = jnp.sum(jnp.where(first_half, blocks, 0.0), axis=1, keepdims=True)
    relative = (jnp.cumsum(blocks, axis=1) - middle).reshape(g.shape)
    row, column = jnp.exp(relative), k * jnp.exp(-relative)
    same_leaf = (i // leaf == j // leaf) & (i >= j)
    kk = jnp.where(same_leaf, kk + dot(k * row, column, tb=True), kk)
    return kk, jnp.where(same_leaf, qk + dot(q * row, column, tb=True), qk)


def add_decayed_products(
    sums: tuple[Array, Array], q: Array, k: Array, g: Array, leaf: int, leaf_dot: Dot, dot: Dot
) -> tuple[tuple[Array, Array], Decayed]:
    """(kk, qk) [C, C] with the terms of a block of key channels added; q, k, g [C, Kb] float32.

    kk is right for i > j, qk for i >= j; above the diagonal they stay as they were.
    """
    size = k.shape[0]
    kk, qk = _add_leaf_pairs(sums, q, k, g, leaf, leaf_dot)
    upto, behind = _leaf_exponents(g, leaf)
    row, column = jnp.exp(upto), jnp.exp(behind)
    totals = jnp.sum(g.reshape(-1, leaf, g.shape[1]), axis=1)
    for level in range(leaf.bit_length() - 1, size.bit_length() - 1):
        mask = halving_mask(size, level)
        kk = jnp.where(mask, kk + dot(k * row, k * column, tb=True), kk)
        qk = jnp.where(mask, qk + dot(q * row, k * column, tb=True), qk)
        row = row * _other_half(totals, 1 << level, 0, g.shape)
        column = column * _other_half(totals, 1 << level, 1, g.shape)
        totals = jnp.sum(totals.reshape(-1, 2, g.shape[1]), axis=1)
    return (kk, qk), Decayed(q * row, k * row, k * column)
