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


class DecayedProducts(NamedTuple):
    """One array per block of key channels, but for the first two."""

    kk: Array  # [C, C], right for i > j
    qk: Array  # [C, C], zero for i < j
    q_from_start: list[Array]  # [C, Kb] times exp(g_1 + ... + g_i)
    k_from_start: list[Array]
    k_to_end: list[Array]  # times exp(g_{i+1} + ... + g_C)
    total: list[Array]  # [Kb] g_1 + ... + g_C


def _leaf_exponents(g: Array, leaf: int) -> tuple[Array, Array]:
    """Sums over each leaf up to and with a token, and behind it. [C, K]"""
    if leaf == 1:
        return g, jnp.zeros_like(g)
    blocks = g.reshape(-1, leaf, g.shape[1])
    upto = jnp.cumsum(blocks, axis=1)
    behind = jnp.sum(blocks, axis=1, keepdims=True) - upto
    return upto.reshape(g.shape), jnp.minimum(behind, 0.0).reshape(g.shape)


def _other_half(sums: Array, half: int, of: int, shape: tuple[int, int]) -> Array:
    """exp(sums of blocks `of`) for the rows of the blocks' neighbours, 1 for the others. [C, K]"""
    pairs = sums.reshape(-1, 2, shape[1])
    which = iota(pairs.shape, 1)
    wanted = jnp.sum(jnp.where(which == of, pairs, 0.0), axis=1, keepdims=True)
    factors = jnp.exp(jnp.where(which == of, 0.0, wanted))
    spread = (pairs.shape[0], 2, half, shape[1])
    return jnp.broadcast_to(factors[:, :, None, :], spread).reshape(shape)


def decayed_products(
    queries: list[Array], keys: list[Array], decays: list[Array], leaf: int, leaf_dot: Dot, dot: Dot
) -> DecayedProducts:
    size = keys[0].shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    same_leaf = (i // leaf == j // leaf) & (i >= j)
    kk = qk = jnp.zeros((size, size), jnp.float32)
    out = DecayedProducts(kk, qk, [], [], [], [])
    for q, k, g in zip(queries, keys, decays, strict=True):
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        if leaf == 1:
            qk = jnp.where(i == j, qk + jnp.sum(q * k, axis=1)[:, None], qk)
        else:
            floored = jnp.maximum(g, -2 * EXPONENT_LIMIT / leaf)
            upto, _ = _leaf_exponents(floored, leaf)
            middle = jnp.sum(
                jnp.where(
                    iota((size // leaf, leaf, 1), 1) < leaf // 2,
                    floored.reshape(-1, leaf, g.shape[1]),
                    0.0,
                ),
                axis=1,
                keepdims=True,
            )
            relative = (upto.reshape(-1, leaf, g.shape[1]) - middle).reshape(g.shape)
            row, column = jnp.exp(relative), k * jnp.exp(-relative)
            kk = jnp.where(same_leaf, kk + leaf_dot(k * row, column, tb=True), kk)
            qk = jnp.where(same_leaf, qk + leaf_dot(q * row, column, tb=True), qk)
        upto, behind = _leaf_exponents(g, leaf)
        row, column = jnp.exp(upto), jnp.exp(behind)
        sums = jnp.sum(g.reshape(-1, leaf, g.shape[1]), axis=1)
        for level in range(leaf.bit_length() - 1, size.bit_length() - 1):
            mask = halving_mask(size, level)
            kk = jnp.where(mask, kk + dot(k * row, k * column, tb=True), kk)
            qk = jnp.where(mask, qk + dot(q * row, k * column, tb=True), qk)
            row = row * _other_half(sums, 1 << level, 0, g.shape)
            column = column * _other_half(sums, 1 << level, 1, g.shape)
            sums = jnp.sum(sums.reshape(-1, 2, g.shape[1]), axis=1)
        out.q_from_start.append(q * row)
        out.k_from_start.append(k * row)
        out.k_to_end.append(k * column)
        out.total.append(jnp.sum(g, axis=0))
    return out._replace(kk=kk, qk=qk)
