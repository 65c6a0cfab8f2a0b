"""What a tile of a short prefill does to a state S, all of it in a program's registers:

    new = (I + A)^-1 b (v - k' S);   o = q' S + P new;   S <- decay S + k''^T new

with A_ij = b_i (k_i . k_j) D_ij for i > j, P_ij = (q_i . k_j) D_ij for i >= j, k' and q' decayed
from the tile's start and k'' to its end, as in `prepare.py` and `scan.py`.

Under one decay per head (GDN) rows of queries and keys are used as they lie in memory: their
lengths and decays scale rows of products and of values, so that a product rounds neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..triton import Dot, exp2, iota
from .channel_decay import LEAST, add_decayed_products
from .head_products import Sums, sums_of
from .inverse import block_inverse
from .reference import L2_EPS

Blocks = list[Array]  # one array a block of key channels


@dataclass(frozen=True)
class ShortTuning:
    """A program takes `tile` tokens at a time and `value_block` columns of the state.

    Two tiles of 16 are as fast as one of 32 where one sequence has all tokens, and take half the
    time where four have them. (KDA's products of a tile of 32 take more registers than there are.)
    """

    tile: int = 16
    value_block: int = 32
    warps: int = 4


@dataclass(frozen=True)
class Numerics:
    """`dot` of what reaches a state, or keys under decay; `inverse_dot` of what stays below 2."""

    dot: Dot
    inverse_dot: Dot

    @classmethod
    def of(cls, bf16: bool, interpret: bool) -> Numerics:
        """bf16 inputs: 5e-3 relative RMS against float64. float32 inputs: 1e-5."""
        names = ("bf16x3", "f16") if bf16 else ("tf32x3", "tf32x3")
        return cls(*(Dot(name, interpret) for name in names))

    def exp2(self, x: Array) -> Array:
        return exp2(x, self.dot.interpret)


class Rows(NamedTuple):
    """A tile's inputs [C, ...]: zeros behind its last token, where g (in base 2) and b are 0."""

    q: Blocks
    k: Blocks
    v: Array
    g: Array | Blocks  # [C], or per channel
    beta: Array


class Tile(NamedTuple):
    """Matrices as above; scales [C] of their rows, where they have none yet."""

    a: Array
    p: Array
    k_from_start: Blocks
    q_from_start: Blocks
    k_to_end: Blocks
    k_scale: Array | None
    q_scale: Array | None
    end_scale: Array | None
    decay: Blocks  # [Kb, 1], or a number


def head_tile(rows: Rows, key_dim: int, numerics: Numerics) -> Tile:
    """Under one decay per head."""
    assert isinstance(rows.g, Array)
    k_length, q_length = _unit(rows.k), _unit(rows.q) * key_dim**-0.5
    upto, whole = sums_of(rows.g)
    between = Sums(*(x[:, None] for x in upto)) - Sums(*(x[None, :] for x in upto))
    decay = numerics.exp2(jnp.minimum(between, 0.0)) * k_length[None, :]
    i, j = (iota(decay.shape, axis) for axis in (0, 1))
    kk, qk = (_products(numerics, x, rows.k) * decay for x in (rows.k, rows.q))
    from_start = numerics.exp2(upto.coarse + upto.fine)
    end = exp2(whole.coarse + whole.fine, numerics.dot.interpret)
    return Tile(
        jnp.where(i > j, kk * (rows.beta * k_length)[:, None], 0.0),
        jnp.where(i >= j, qk * q_length[:, None], 0.0),
        *(rows.k, rows.q, rows.k),
        *(k_length * from_start, q_length * from_start, k_length * numerics.exp2(whole - upto)),
        [end] * len(rows.k),
    )


def channel_tile(
    rows: Rows, key_dim: int, leaf: int, mask: Callable[[int], Array], numerics: Numerics
) -> Tile:
    """Under a decay per key channel; `mask` n of `channel_decay.sum_masks`."""
    assert isinstance(rows.g, list)
    dot = numerics.dot
    k_length, q_length = _unit(rows.k), _unit(rows.q) * key_dim**-0.5
    size = rows.beta.shape[0]
    zeros = jnp.zeros((size, size), jnp.float32)
    sums: tuple[Array, Array | None] = (zeros, zeros)
    tile = Tile(zeros, zeros, [], [], [], None, None, None, [])
    for q, k, g in zip(rows.q, rows.k, rows.g, strict=True):
        q, k = (x.astype(jnp.float32) * y[:, None] for x, y in ((q, q_length), (k, k_length)))
        g = jnp.maximum(g, LEAST)

        def sum_of(index: int, g: Array) -> Array:
            return dot(mask(index), g)

        sums, decayed = add_decayed_products(sums, q, k, g, sum_of, leaf, dot, dot)
        assert decayed.q_from_start is not None
        tile.k_from_start.append(decayed.k_from_start)
        tile.q_from_start.append(decayed.q_from_start)
        tile.k_to_end.append(decayed.k_to_end)
        tile.decay.append(numerics.exp2(jnp.sum(g, axis=0))[:, None])
    kk, qk = sums
    assert qk is not None
    i, j = (iota(kk.shape, axis) for axis in (0, 1))
    a = jnp.where(i > j, kk * rows.beta[:, None], 0.0)
    return tile._replace(a=a, p=jnp.where(i >= j, qk, 0.0))


def apply(tile: Tile, rows: Rows, state: Blocks, numerics: Numerics) -> tuple[Array, Blocks]:
    """Outputs [C, W], and the state [Kb, W] behind the tile."""
    dot = numerics.dot
    inverse = block_inverse(tile.a, numerics.inverse_dot)
    known = _scaled(_of_state(dot, tile.k_from_start, state), tile.k_scale)
    rest = rows.beta[:, None] * (rows.v.astype(jnp.float32) - known)
    asked = _scaled(_of_state(dot, tile.q_from_start, state), tile.q_scale)
    new = dot(inverse, rest)
    o = asked + dot(tile.p, new)
    new = _scaled(new, tile.end_scale)
    state = [
        s * decay + dot(k, new, ta=True)
        for s, decay, k in zip(state, tile.decay, tile.k_to_end, strict=True)
    ]
    return o, state


def _unit(parts: Blocks) -> Array:
    """What gives rows length 1 [C]."""
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1) for x in parts)
    return lax.rsqrt(functools.reduce(jnp.add, squares) + L2_EPS)


def _products(numerics: Numerics, rows: Blocks, columns: Blocks) -> Array:
    """rows columns^T [C, C]"""
    dots = (numerics.dot(x, y, tb=True) for x, y in zip(rows, columns, strict=True))
    return functools.reduce(jnp.add, dots)


def _of_state(dot: Dot, rows: Blocks, state: Blocks) -> Array:
    """rows S [C, W]"""
    dots = (dot(x, s) for x, s in zip(rows, state, strict=True))
    return functools.reduce(jnp.add, dots)


def _scaled(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x * scale[:, None]
