"""Decayed products of a tile under a decay per key channel (KDA), by one warp per (head, tile).

    A_ij = b_i sum_c k_ic k_jc D_ijc  (i > j);   P_ij = sum_c q_ic k_jc D_ijc  (i >= j)

with D_ijc = exp(g_{j+1,c} + ... + g_{i,c}). Left of the diagonal blocks of 16 rows D is a product:
exp of the sum from the start of i's block, times exp of the sum from j up to that start. Both
exponents are at most 0 whatever the decay, and neither is a difference of longer sums. The keys
times the second factor are kept in `k_to_end`, where each further block of rows multiplies them by
its own decay, until they are what the scan needs. `channel_decay.py` has the diagonal blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..triton import dividing_block, iota
from .channel_decay import LEAST, add_decayed_products
from .tile import BLOCK, Tile, block_rows


class _Rows(NamedTuple):
    """A block of rows in a part of the key channels, decayed from the block's start."""

    q: Array | None  # [16, Kb]
    k: Array
    whole: Array  # [Kb] over the block


def channel_products(t: Tile) -> None:
    key_head = t.head // t.group
    t.store_value_size(t.head, t.load_values(key_head, t.head % t.group))

    def block_step(block: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
        beta = t.beta(block * BLOCK, BLOCK, t.head)
        t.out.beta[t.index, t.head, block_rows(block)] = beta
        rows = _store_diagonal(t, block, key_head, beta, before)
        t.clear_above(t.head, block)
        t.barrier()  # orders what the threads wrote for each other, here and below
        step = functools.partial(_step_left, t, block, rows, beta)
        lax.fori_loop(0, block, step, jnp.int32(0))
        return tuple(x * row.whole for x, row in zip(before, rows, strict=True))

    start = tuple(jnp.ones((width,), jnp.float32) for _, width in _parts(t))
    decays = lax.fori_loop(0, t.blocks, block_step, start)
    for part, decay in zip(_parts(t), decays, strict=True):
        t.out.decay[t.index, t.head, pl.ds(*part)] = decay


def _parts(t: Tile) -> list[tuple[int, int]]:
    width = dividing_block(t.options.key_dim, t.options.tuning.key_block)
    return [(offset, width) for offset in range(0, t.options.key_dim, width)]


def _store_diagonal(
    t: Tile, block: Array, key_head: Array, beta: Array, before: tuple[Array, ...]
) -> list[_Rows]:
    """`before` is the decay from the tile's start to the block's, of each part."""
    inputs, out, outputs = t.inputs, t.out, t.options.outputs
    queries, keys = t.load_keys(block * BLOCK, BLOCK, key_head, _parts(t))
    k_scale = t.unit_scale(keys)
    q_scale = None if queries is None else t.unit_scale(queries) * t.options.key_dim**-0.5
    zeros = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    sums: Any = (zeros, zeros if outputs else None)
    rows = []

    def sum_of(mask: int, g: Array) -> Array:
        return t.dot(inputs.masks[mask], g)

    for n, (offset, width) in enumerate(_parts(t)):
        part = pl.ds(offset, width)
        k, q = keys[n].astype(jnp.float32) * k_scale, None
        if queries is not None and q_scale is not None:
            q = queries[n].astype(jnp.float32) * q_scale
        g = jnp.maximum(t.log2_decay(block * BLOCK, BLOCK, t.head, part), LEAST)
        sums, decayed = add_decayed_products(
            sums, q, k, g, sum_of, t.options.tuning.decay_leaf, t.leaf_dot, t.dot
        )
        cell = t.index, t.head, block_rows(block), part
        out.k[cell] = (decayed.k_from_start * before[n][None, :]).astype(out.k.dtype)
        out.k_to_end[cell] = decayed.k_to_end.astype(out.k.dtype)
        from_block = decayed.q_from_start
        if from_block is not None:
            out.q[cell] = (from_block * before[n][None, :]).astype(out.q.dtype)
            from_block = from_block.astype(out.q.dtype)
        whole = t.exp2(jnp.sum(g, axis=0))
        rows.append(_Rows(from_block, decayed.k_from_start.astype(out.k.dtype), whole))
    kk, qk = sums
    i, j = iota((BLOCK, BLOCK), 0), iota((BLOCK, BLOCK), 1)
    t.store_block(out.t, t.head, block, block, jnp.where(i > j, kk * beta[:, None], 0.0))
    if qk is not None:
        t.store_block(out.p, t.head, block, block, jnp.where(i >= j, qk, 0.0))
    return rows


def _step_left(
    t: Tile, block: Array, rows: list[_Rows], beta: Array, column: Array, carry: Array
) -> Array:
    """Block (block, column)."""
    out = t.out
    cells = [(t.index, t.head, block_rows(column), pl.ds(*part)) for part in _parts(t)]
    columns = [out.k_to_end[cell] for cell in cells]
    t.barrier()
    for cell, k, row in zip(cells, columns, rows, strict=True):
        decayed = k.astype(jnp.float32) * row.whole[None, :]
        out.k_to_end[cell] = decayed.astype(k.dtype)

    def product(parts: list[Array]) -> Array:
        dots = (t.dot(x, k, tb=True) for x, k in zip(parts, columns, strict=True))
        return functools.reduce(jnp.add, dots)

    t.store_block(out.t, t.head, block, column, product([row.k for row in rows]) * beta[:, None])
    if t.options.outputs:
        queries = [row.q for row in rows if row.q is not None]
        t.store_block(out.p, t.head, block, column, product(queries))
    t.barrier()
    return carry
