"""Products of queries and keys under per-channel decay (KDA), inside a kernel.

    kk_ij = sum_c k_ic k_jc exp(g_{j+1,c} + ... + g_{i,c});   qk_ij likewise with q_i

A product of two matrices needs the exponential split into a factor of i and a factor of j. Cut at
a token between j and i both exponents are sums of log-decays and never positive, whatever the
decay; so the pairs are taken level by level, each level cut at its block borders (the i of a
pair in a block's upper half, its j in the lower).

Pairs nearer than a leaf would cost a level each. In a leaf of s rows the cut is the leaf's middle,
on the wrong side for some pairs, where the exponents reach s/2 log-decays above zero. There
log2-decays are floored at -208 / s, so that no factor leaves the range of float32. A floored decay
is still below 2^(-208 / s) in size: off by at most 1.3e-4 of the product of the vectors for
s = 16 (for bf16), and below float32 rounding for s <= 8. s = 1 floors nothing.

Sums of log-decays are matrix products with the zeros and ones of `sum_masks`: exact but for the
rounding of g itself, which is the same in all of them; no sum is a difference of longer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..triton import Dot, exp2, iota
from .inverse import halving_mask

EXPONENT_LIMIT = 104.0  # 2^104 times a key, and its inverse, are normal in float32 and bf16
LEAST = -6e4  # a log-decay that float16 holds

Sums = Callable[[int, Array], Array]  # (number of a mask, g [C, Kb]) -> [C, Kb]


class Decayed(NamedTuple):
    """Queries and keys [C, Kb] with decays from the tile's start or to its end."""

    q_from_start: Array | None  # times exp(g_1 + ... + g_i)
    k_from_start: Array
    k_to_end: Array  # times exp(g_{i+1} + ... + g_C)


def sum_masks(size: int, leaf: int, dtype: DTypeLike) -> Array:
    """[n, C, C] of 0, 1 and -1: each times g is a sum of log-decays for every row.

    From the tile's start; to its end; from the middle of the leaf; and for each level, in the
    upper half of a block from that half's start, in the lower half to that half's end.
    """
    i, m = np.arange(size)[:, None], np.arange(size)[None, :]
    upto, behind = m <= i, m > i
    middle = i // leaf * leaf + leaf // 2
    from_middle = (upto & (m >= middle)) * 1 - (behind & (m < middle)) * 1
    masks = [upto, behind, from_middle]
    for level in range(leaf.bit_length() - 1, size.bit_length() - 1):
        same_half = i >> level == m >> level
        masks.append(same_half & np.where((i >> level) & 1 == 1, upto, behind))
    return jnp.asarray(np.stack(masks), dtype)


def _add_leaf_pairs(
    sums: tuple[Array, Array | None],
    q: Array | None,
    k: Array,
    g: Array,
    sum_of: Sums,
    leaf: int,
    dot: Dot,
) -> tuple[Array, Array | None]:
    kk, qk = sums
    size = k.shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    if leaf == 1:  # kk is not needed on the diagonal
        if q is not None and qk is not None:
            qk = jnp.where(i == j, qk + jnp.sum(q * k, axis=1)[:, None], qk)
        return kk, qk
    relative = sum_of(2, jnp.maximum(g, -2 * EXPONENT_LIMIT / leaf))
    row, column = (exp2(x, dot.interpret) for x in (relative, -relative))
    column = k * column
    same_leaf = (i // leaf == j // leaf) & (i >= j)
    kk = jnp.where(same_leaf, kk + dot(k * row, column, tb=True), kk)
    if q is not None and qk is not None:
        qk = jnp.where(same_leaf, qk + dot(q * row, column, tb=True), qk)
    return kk, qk


def add_decayed_products(
    sums: tuple[Array, Array | None],
    q: Array | None,
    k: Array,
    g: Array,
    sum_of: Sums,
    leaf: int,
    leaf_dot: Dot,
    dot: Dot,
) -> tuple[tuple[Array, Array | None], Decayed]:
    """(kk, qk) [C, C] with the terms of a block of key channels added; q, k, g [C, Kb] float32.

    kk is right for i > j, qk for i >= j; above the diagonal they stay as they were. Without
    queries, qk is None.
    """
    size = k.shape[0]
    kk, qk = _add_leaf_pairs(sums, q, k, g, sum_of, leaf, leaf_dot)
    for n, level in enumerate(range(leaf.bit_length() - 1, size.bit_length() - 1)):
        decay = exp2(sum_of(3 + n, g), dot.interpret)
        mask, decayed = halving_mask(size, level), k * decay
        kk = jnp.where(mask, kk + dot(decayed, decayed, tb=True), kk)
        if q is not None and qk is not None:
            qk = jnp.where(mask, qk + dot(q * decay, decayed, tb=True), qk)
    from_start, to_end = (exp2(sum_of(n, g), dot.interpret) for n in (0, 1))
    out = Decayed(None if q is None else q * from_start, k * from_start, k * to_end)
    return (kk, qk), out
