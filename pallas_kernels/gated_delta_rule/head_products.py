"""Decayed products of a tile under one decay per head (GDN), by a program per (key head, tile).

    A_ij = b_i (k_i . k_j) D_ij  (i > j);   P_ij = (q_i . k_j) D_ij  (i >= j)

D_ij = exp(g_{j+1} + ... + g_i) from differences of sums from the tile's start, kept in two parts
so that what a difference cancels costs no digit of what is left.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ..triton import iota, power_of_two_blocks
from .tile import Tile

LEAST = -40.0  # log2 of a decay


def head_products(t: Tile) -> None:
    parts = list(power_of_two_blocks(t.options.key_dim, t.options.tuning.key_block))
    q, k = t.load_keys(0, t.size, t.head, parts)
    values = [t.load_values(t.head, place) for place in range(t.group)]
    heads = [t.head * t.group + place for place in range(t.group)]
    gates = [(t.log2_decay(0, t.size, head), t.beta(0, t.size, head)) for head in heads]
    for head, of_head in zip(heads, values, strict=True):  # first: they hold half of the registers
        t.store_value_size(head, of_head)
    k = _store_units(t, t.out.k, k, parts, 1.0)
    i, j = iota((t.size, t.size), 0), iota((t.size, t.size), 1)
    kk, qk = jnp.where(i > j, _products(t, k, k), 0.0), None
    if q is not None:
        q = _store_units(t, t.out.q, q, parts, t.options.key_dim**-0.5)
        qk = jnp.where(i >= j, _products(t, q, k), 0.0)
    for head, (g, beta) in zip(heads, gates, strict=True):
        _store_products(t, head, kk, qk, g, beta)


def _store_units(
    t: Tile, ref: Any, rows: list[Array], parts: list[tuple[int, int]], size: float
) -> list[Array]:
    """Rows [C, K] of length `size`."""
    scale = t.unit_scale(rows) * size
    units = [(x.astype(jnp.float32) * scale).astype(ref.dtype) for x in rows]
    for (first, width), x in zip(parts, units, strict=True):
        ref[t.index, t.head, :, pl.ds(first, width)] = x
    return units


def _products(t: Tile, rows: list[Array], columns: list[Array]) -> Array:
    """rows columns^T [C, C]"""
    dots = (t.dot(x, y, tb=True) for x, y in zip(rows, columns, strict=True))
    return functools.reduce(jnp.add, dots)


class Sums(NamedTuple):
    """Of log2-decays: coarse + fine, of which the coarse parts and their differences are exact."""

    coarse: Array
    fine: Array

    def __sub__(self, other: Sums) -> Array:
        return (self.coarse - other.coarse) + (self.fine - other.fine)


def sums_of(g: Array) -> tuple[Sums, Sums]:
    """From the tile's start to each token's end [C], and the whole. 64 multiples of 2^-12 down to
    -LEAST have sums of 24 bits; 2^LEAST is nothing beside 1."""
    g = jnp.maximum(g, LEAST)
    coarse = jnp.floor(g * 2.0**12) * 2.0**-12
    parts = Sums(coarse, g - coarse)
    return Sums(*map(jnp.cumsum, parts)), Sums(*map(jnp.sum, parts))


def _store_products(t: Tile, head: Any, kk: Array, qk: Array | None, g: Array, beta: Array) -> None:
    """Everything of a value head; products are 0 above the diagonal, g [C] is in base 2."""
    out, cell = t.out, (t.index, head)
    upto, whole = sums_of(g)
    between = Sums(*(x[:, None] for x in upto)) - Sums(*(x[None, :] for x in upto))
    decay = t.exp2(jnp.minimum(between, 0.0))  # positive above the diagonal, where products are 0
    out.t[cell] = (kk * decay * beta[:, None]).astype(out.t.dtype)
    if qk is not None:
        out.p[cell] = (qk * decay).astype(out.p.dtype)
    out.beta[cell] = beta
    out.from_start[cell] = t.exp2(upto.coarse + upto.fine)
    out.to_end[cell] = t.exp2(whole - upto)
