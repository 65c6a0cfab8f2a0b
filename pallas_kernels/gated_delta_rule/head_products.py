"""Decayed products of a tile under one decay per head (GDN), by one warp per (key head, tile).

    A_ij = b_i (k_i . k_j) D_ij  (i > j);   P_ij = (q_i . k_j) D_ij  (i >= j)

D_ij = exp(g_{j+1} + ... + g_i) is a matrix of exponentials in diagonal blocks alone. Left of them
it is a product, exp of the sum from the start of i's block times exp of the sum from j up to that
start: no exponent is above 0, and none is a difference of long sums. The second factor is kept in
`to_end`: each further block of rows multiplies it by its own decay.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..triton import iota, power_of_two_blocks
from .tile import BLOCK, Tile, block_rows


class _Rows(NamedTuple):
    """Of a value head in a block of rows."""

    decay: Array  # [16] from the block's start
    beta: Array  # [16]
    whole: Array  # over the block


def head_products(t: Tile) -> None:
    heads = [(place, t.head * t.group + place) for place in range(t.group)]
    t.store_value_sizes(t.head, heads)
    for _, head in heads:
        _store_gates(t, head)
    t.barrier()  # orders what the threads wrote for each other, here and below

    def block_step(block: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
        q, k = _store_units(t, block)
        kk, qk = _products(t, q, k, k)
        rows = []
        for (_, head), decay in zip(heads, before, strict=True):
            rows.append(_store_diagonal(t, block, head, kk, qk, decay))
            t.clear_above(head, block)
        t.barrier()
        lax.fori_loop(0, block, functools.partial(_step_left, t, block, q, k, rows), jnp.int32(0))
        return tuple(x * row.whole for x, row in zip(before, rows, strict=True))

    start = (jnp.ones((), jnp.float32),) * len(heads)
    decays = lax.fori_loop(0, t.blocks, block_step, start)
    for (_, head), decay in zip(heads, decays, strict=True):
        t.out.decay[t.index, head] = decay


def _parts(t: Tile) -> list[tuple[int, int]]:
    return list(power_of_two_blocks(t.options.key_dim, t.options.tuning.key_block))


def _store_gates(t: Tile, head: Any) -> None:
    """Activated once, by all threads; log2-decays wait in `to_end` for their block's turn."""
    size = t.blocks * BLOCK
    t.out.to_end[t.index, head] = t.log2_decay(0, size, head)
    t.out.beta[t.index, head] = t.beta(0, size, head)


def _store_units(t: Tile, block: Array) -> tuple[list[Array] | None, list[Array]]:
    """Queries and keys, normalised."""

    def stored(ref: Any, rows: list[Array], scale: Array) -> list[Array]:
        rows = [(x.astype(jnp.float32) * scale).astype(ref.dtype) for x in rows]
        for part, x in zip(_parts(t), rows, strict=True):
            ref[t.index, t.head, block_rows(block), pl.ds(*part)] = x
        return rows

    q, k = t.load_keys(block, t.head, _parts(t))
    if q is not None:
        q = stored(t.out.q, q, t.unit_scale(q) * t.options.key_dim**-0.5)
    return q, stored(t.out.k, k, t.unit_scale(k))


def _products(
    t: Tile, q: list[Array] | None, k: list[Array], columns: list[Array]
) -> tuple[Array, Array | None]:
    """k columns^T and q columns^T [16, 16]"""

    def product(rows: list[Array]) -> Array:
        dots = (t.dot(x, y, tb=True) for x, y in zip(rows, columns, strict=True))
        return functools.reduce(jnp.add, dots)

    return product(k), None if q is None else product(q)


def _store_diagonal(
    t: Tile, block: Array, head: Any, kk: Array, qk: Array | None, before: Array
) -> _Rows:
    """`before` is the decay from the tile's start to the block's."""
    cell = t.index, head, block_rows(block)
    g, beta = t.out.to_end[cell], t.out.beta[cell]
    t.barrier()
    i, j = iota((BLOCK, BLOCK), 0), iota((BLOCK, BLOCK), 1)
    behind = jnp.where(i > j, g[:, None], 0.0)
    decay = t.exp2(jnp.cumsum(behind, axis=0))
    a = jnp.where(i > j, kk * decay * beta[:, None], 0.0)
    t.store_block(t.out.t, head, block, block, a)
    if qk is not None:
        t.store_block(t.out.p, head, block, block, jnp.where(i >= j, qk * decay, 0.0))
    from_block = t.exp2(jnp.cumsum(g))
    t.out.from_start[cell] = from_block * before
    t.out.to_end[cell] = t.exp2(jnp.sum(behind, axis=0))
    return _Rows(from_block, beta, t.exp2(jnp.sum(g)))


def _step_left(
    t: Tile,
    block: Array,
    q: list[Array] | None,
    k: list[Array],
    rows: list[_Rows],
    column: Array,
    carry: Array,
) -> Array:
    """Block (block, column) of every value head."""
    columns = [t.out.k[t.index, t.head, block_rows(column), pl.ds(*x)] for x in _parts(t)]
    kk, qk = _products(t, q, k, columns)
    for place, row in enumerate(rows):
        head = t.head * t.group + place
        cell = t.index, head, block_rows(column)
        decay = t.out.to_end[cell]
        t.barrier()
        t.out.to_end[cell] = decay * row.whole
        scaled = row.decay[:, None] * decay[None, :]
        t.store_block(t.out.t, head, block, column, kk * (scaled * row.beta[:, None]))
        if qk is not None:
            t.store_block(t.out.p, head, block, column, qk * scaled)
    t.barrier()
    return carry
