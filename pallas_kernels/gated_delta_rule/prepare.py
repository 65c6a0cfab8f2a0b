"""First kernel of a prefill: what a tile of tokens does to any state, per (tile, value head).

With decay D_ij = exp(g_{j+1} + ... + g_i) and r the inverse l2-norms of the keys:

    A = b_i r_i r_j (k_i . k_j) D_ij  (i > j);   T = (I + A)^-1
    U = T (b v);   W = T (b r exp(G) k);   P = s_i r_j (q_i . k_j) D_ij  (i >= j)

The kernel also writes the queries and keys that the scan needs: normalised ones for each key head
(GDN; decays are left to scales of rows), decayed ones for each value head (KDA).

For bf16 inputs the tiles are float16: everything in them is bounded by the norms of the keys, but
for the values, of which each tile's are scaled to at most 1. Three more bits than bf16 has matter:
with repeated keys each token takes back what the one before it wrote, and the roundings of a
whole tile add up.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ..ragged import TileRanges
from ..triton import Dot, dividing_block, iota, power_of_two_blocks, triton_call
from .channel_decay import add_decayed_products
from .inverse import unit_lower_inverse
from .reference import L2_EPS
from .tuning import PrefillTuning

SMALLEST = 1e-30  # a tile of zeros is divided by this


def _inverse_norm(parts: list[Array]) -> Array:
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1) for x in parts)
    return lax.rsqrt(functools.reduce(jnp.add, squares) + L2_EPS)


def _head_decay(g: Array, exact: bool) -> tuple[Array, Array, Array]:
    """D [C, C] (0 above the diagonal), exp(G) [C], exp of the sums behind each token [C]."""
    size = g.shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    upto = jnp.cumsum(g)
    if exact:  # sums over the short range alone: differences of long sums cancel
        sums = jnp.cumsum(jnp.where(i > j, g[:, None], 0.0), axis=0)
    else:
        sums = upto[:, None] - upto[None, :]
    # masked before the exponential: above the diagonal it would overflow
    decay = jnp.where(i >= j, jnp.exp(jnp.where(i >= j, sums, 0.0)), 0.0)
    behind = jnp.sum(jnp.where(i > j, g[:, None], 0.0), axis=0)
    return decay, jnp.exp(upto), jnp.exp(behind)


class _Tile:
    """A program's tile: loads of its tokens, stores to its cells, products in its precisions."""

    def __init__(self, start_ref: Any, rows_ref: Any, tuning: PrefillTuning, interpret: bool):
        self.head, self.index = pl.program_id(0), pl.program_id(1)
        self.size, self.tuning = tuning.chunk, tuning
        self.tokens = pl.ds(start_ref[self.index], self.size)
        self.valid = iota((self.size,), 0) < rows_ref[self.index]
        self.dot = Dot(tuning.products, interpret)
        self.leaf_dot = Dot(tuning.leaf_products, interpret)
        self.inverse_dot = Dot(tuning.inverse_products, interpret)
        self.bf16_dot, self.f32_dot = Dot("bf16", interpret), Dot("tf32x3", interpret)

    def load(self, ref: Any, *index: Any) -> Array:
        mask = self.valid if len(index) == 1 else self.valid[:, None]
        return plt.load(ref.at[(self.tokens, *index)], mask=mask, other=0.0)

    def load32(self, ref: Any, *index: Any) -> Array:
        return self.load(ref, *index).astype(jnp.float32)

    def store(self, ref: Any, x: Array, part: Any = None) -> None:
        index = () if part is None else (slice(None), part)
        ref[(self.index, self.head, *index)] = x.astype(ref.dtype)

    def exact_dot(self, a: Array, b: Array) -> Array:
        """a b^T of the inputs themselves."""
        return (self.bf16_dot if a.dtype == jnp.bfloat16 else self.f32_dot)(a, b, tb=True)

    def inverse(self, kk: Array, beta: Array) -> Array:
        i, j = iota(kk.shape, 0), iota(kk.shape, 1)
        a = jnp.where(i > j, kk * beta[:, None], 0.0)
        return unit_lower_inverse(a, self.tuning.inverse_leaf, self.inverse_dot)


def _solve_values(t: _Tile, v_ref: Any, u_ref: Any, size_ref: Any, solve: Array) -> None:
    """U, in units of the tile's largest value."""
    parts = [pl.ds(*block) for block in power_of_two_blocks(v_ref.shape[2])]
    sizes = (jnp.max(jnp.abs(t.load32(v_ref, t.head, part))) for part in parts)
    largest = jnp.maximum(functools.reduce(jnp.maximum, sizes), SMALLEST)
    size_ref[t.head, t.index] = largest
    for part in parts:
        t.store(u_ref, t.dot(solve, t.load32(v_ref, t.head, part) * (1.0 / largest)), part)


def _head_kernel(
    start_ref: Any,
    rows_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    beta_ref: Any,
    u_ref: Any,
    w_ref: Any,
    p_ref: Any,
    size_ref: Any,
    decay_ref: Any,
    q_out_ref: Any,
    k_out_ref: Any,
    q_scale_ref: Any,
    k_scale_ref: Any,
    *,
    tuning: PrefillTuning,
    interpret: bool,
) -> None:
    """Decay per head. Arrays [C, K] are loaded again where that is cheaper than keeping them."""
    t = _Tile(start_ref, rows_ref, tuning, interpret)
    group = v_ref.shape[1] // k_ref.shape[1]
    key_head, key_dim = t.head // group, k_ref.shape[2]
    keys = [pl.ds(*block) for block in power_of_two_blocks(key_dim)]

    @pl.when(rows_ref[t.index] > 0)
    def _() -> None:
        q = [t.load(q_ref, key_head, part) for part in keys]
        k = [t.load(k_ref, key_head, part) for part in keys]
        beta, g = t.load32(beta_ref, t.head), t.load32(g_ref, t.head)
        q_scale, k_scale = _inverse_norm(q) * key_dim**-0.5, _inverse_norm(k)
        decay, from_start, to_end = _head_decay(g, exact=k_ref.dtype != jnp.bfloat16)
        t.store(decay_ref, jnp.exp(jnp.sum(g)))
        t.store(q_scale_ref, from_start)
        t.store(k_scale_ref, to_end)

        @pl.when(t.head % group == 0)
        def _() -> None:
            for part, x, y in zip(keys, q, k, strict=True):
                for ref, z, scale in ((q_out_ref, x, q_scale), (k_out_ref, y, k_scale)):
                    z = z.astype(jnp.float32) * scale[:, None]
                    ref[t.index, key_head, :, part] = z.astype(ref.dtype)

        qk = functools.reduce(jnp.add, map(t.exact_dot, q, k))
        p_ref[t.index, t.head] = (qk * decay * (q_scale[:, None] * k_scale[None, :])).astype(
            p_ref.dtype
        )
        kk = functools.reduce(jnp.add, map(t.exact_dot, k, k))
        inverse = t.inverse(kk * decay * (k_scale[:, None] * k_scale[None, :]), beta)
        solve = inverse * (beta * from_start)[None, :]
        for part in keys:
            t.store(w_ref, t.dot(solve, t.load32(k_ref, key_head, part) * k_scale[:, None]), part)
        _solve_values(t, v_ref, u_ref, size_ref, inverse * beta[None, :])


def _channel_kernel(
    start_ref: Any,
    rows_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    beta_ref: Any,
    u_ref: Any,
    w_ref: Any,
    p_ref: Any,
    size_ref: Any,
    decay_ref: Any,
    q_out_ref: Any,
    k_out_ref: Any,
    *,
    tuning: PrefillTuning,
    interpret: bool,
) -> None:
    """Decay per channel, in a loop over blocks of key channels: no array is [C, K]."""
    t = _Tile(start_ref, rows_ref, tuning, interpret)
    key_head, key_dim = t.head // (v_ref.shape[1] // k_ref.shape[1]), k_ref.shape[2]
    width = dividing_block(key_dim, tuning.key_block)

    @pl.when(rows_ref[t.index] > 0)
    def _() -> None:
        keys = [pl.ds(*block) for block in power_of_two_blocks(key_dim)]
        q_scale = _inverse_norm([t.load(q_ref, key_head, part) for part in keys]) * key_dim**-0.5
        k_scale = _inverse_norm([t.load(k_ref, key_head, part) for part in keys])

        def add_block(block: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            part = pl.ds(block * width, width)
            q = t.load32(q_ref, key_head, part) * q_scale[:, None]
            k = t.load32(k_ref, key_head, part) * k_scale[:, None]
            g = t.load32(g_ref, t.head, part)
            sums, decayed = add_decayed_products(
                sums, q, k, g, tuning.decay_leaf, t.leaf_dot, t.dot
            )
            t.store(q_out_ref, decayed.q_from_start, part)
            t.store(k_out_ref, decayed.k_to_end, part)
            t.store(w_ref, decayed.k_from_start, part)  # read back below
            decay_ref[t.index, t.head, part] = jnp.exp(jnp.sum(g, axis=0))
            return sums

        zeros = jnp.zeros((t.size, t.size), jnp.float32)
        kk, qk = lax.fori_loop(0, key_dim // width, add_block, (zeros, zeros))
        p_ref[t.index, t.head] = qk.astype(p_ref.dtype)
        beta = t.load32(beta_ref, t.head)
        solve = t.inverse(kk, beta) * beta[None, :]
        if not interpret:
            plt.debug_barrier()  # the keys in w_ref were written by other threads
        for part in keys:
            t.store(w_ref, t.dot(solve, w_ref[t.index, t.head, :, part]), part)
        _solve_values(t, v_ref, u_ref, size_ref, solve)


class Prepared(NamedTuple):
    """What the scan reads. In GDN queries and keys are shared by the value heads of a key head."""

    u: Array  # [N, H, C, V], values divided by `value_size`
    w: Array  # [N, H, C, K]
    p: Array  # [N, H, C, C]
    value_size: Array  # [H, N] the tile's largest value
    decay: Array  # over the tile: [N, H], KDA [N, H, K]
    q: Array  # [N, Hk, C, K]
    k: Array  # [N, Hk, C, K]
    q_scale: Array | None = None  # of rows [N, H, C]; KDA: None, already in q and k
    k_scale: Array | None = None


def prepare(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    tiles: TileRanges,
    tuning: PrefillTuning,
    *,
    interpret: bool,
) -> Prepared:
    count, (heads, value_dim), (key_heads, key_dim) = tiles.start.shape[0], v.shape[1:], k.shape[1:]
    cells = (count, heads, tuning.chunk)
    per_channel = g.ndim == 3

    def out(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tile = functools.partial(out, dtype=tuning.tile_dtype)
    call = triton_call(
        functools.partial(
            _channel_kernel if per_channel else _head_kernel, tuning=tuning, interpret=interpret
        ),
        "gated_delta_rule_prepare",
        (heads, count),
        (
            tile(*cells, value_dim),
            tile(*cells, key_dim),
            tile(*cells, tuning.chunk),
            out(heads, count),
            out(count, heads, key_dim) if per_channel else out(count, heads),
            tile(count, key_heads, tuning.chunk, key_dim),
            tile(count, key_heads, tuning.chunk, key_dim),
            *(() if per_channel else (out(*cells), out(*cells))),
        ),
        warps=tuning.prepare_warps,
        interpret=interpret,
    )
    return Prepared(*call(tiles.start, tiles.rows, q, k, v, g, beta))
