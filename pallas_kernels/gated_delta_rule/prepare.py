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
from ..triton import MAX_BLOCK, Dot, dividing_block, iota, power_of_two_blocks, triton_call
from .channel_decay import decayed_products
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


def _kernel(
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
    *row_scale_refs: Any,
    per_channel: bool,
    tuning: PrefillTuning,
    interpret: bool,
) -> None:
    head, tile = pl.program_id(0), pl.program_id(1)
    size, key_dim, value_dim = tuning.chunk, k_ref.shape[2], v_ref.shape[2]
    group = v_ref.shape[1] // k_ref.shape[1]
    key_head = head // group
    exact = Dot("bf16", interpret) if k_ref.dtype == jnp.bfloat16 else Dot("tf32x3", interpret)
    dot = Dot(tuning.products, interpret)
    leaf_dot = Dot(tuning.leaf_products, interpret)
    inverse_dot = Dot(tuning.inverse_products, interpret)
    keys = [pl.ds(offset, width) for offset, width in power_of_two_blocks(key_dim)]

    def store(ref: Any, index: Any, x: Array) -> None:
        ref[(tile, head, *index)] = x.astype(ref.dtype)

    @pl.when(rows_ref[tile] > 0)
    def _() -> None:
        tokens = pl.ds(start_ref[tile], size)
        valid = iota((size,), 0) < rows_ref[tile]

        def load(ref: Any, *index: Any) -> Array:
            mask = valid if len(index) == 1 else valid[:, None]
            return plt.load(ref.at[(tokens, *index)], mask=mask, other=0.0)

        i, j = iota((size, size), 0), iota((size, size), 1)
        q = [load(q_ref, key_head, part) for part in keys]
        k = [load(k_ref, key_head, part) for part in keys]
        beta = load(beta_ref, head).astype(jnp.float32)
        q_scale, k_scale = _inverse_norm(q) * key_dim**-0.5, _inverse_norm(k)
        normal_q = [x.astype(jnp.float32) * q_scale[:, None] for x in q]
        normal_k = [x.astype(jnp.float32) * k_scale[:, None] for x in k]
        if per_channel:
            g = [load(g_ref, head, part).astype(jnp.float32) for part in keys]
            products = decayed_products(normal_q, normal_k, g, tuning.decay_leaf, leaf_dot, dot)
            kk, qk, w_keys, w_scale = products.kk, products.qk, products.k_from_start, beta
            for part, x, y, total in zip(
                keys, products.q_from_start, products.k_to_end, products.total, strict=True
            ):
                store(q_out_ref, (slice(None), part), x)
                store(k_out_ref, (slice(None), part), y)
                store(decay_ref, (part,), jnp.exp(total))
        else:
            g = load(g_ref, head).astype(jnp.float32)
            decay, from_start, to_end = _head_decay(g, exact=k_ref.dtype != jnp.bfloat16)
            # Products of the inputs themselves: exact, and rounded nowhere before the scaling.
            kk = functools.reduce(jnp.add, (exact(x, x, tb=True) for x in k))
            qk = functools.reduce(
                jnp.add, (exact(x, y, tb=True) for x, y in zip(q, k, strict=True))
            )
            kk = kk * decay * (k_scale[:, None] * k_scale[None, :])
            qk = qk * decay * (q_scale[:, None] * k_scale[None, :])
            w_keys, w_scale = normal_k, beta * from_start
            store(decay_ref, (), jnp.exp(jnp.sum(g)))
            for ref, scale in zip(row_scale_refs, (from_start, to_end), strict=True):
                store(ref, (slice(None),), scale)

            @pl.when(head % group == 0)
            def _() -> None:
                for part, x, y in zip(keys, normal_q, normal_k, strict=True):
                    q_out_ref[tile, key_head, :, part] = x.astype(q_out_ref.dtype)
                    k_out_ref[tile, key_head, :, part] = y.astype(k_out_ref.dtype)

        store(p_ref, (slice(None), slice(None)), qk)
        a = jnp.where(i > j, kk * beta[:, None], 0.0)
        inverse = unit_lower_inverse(a, tuning.inverse_leaf, inverse_dot)
        for part, x in zip(keys, w_keys, strict=True):
            store(w_ref, (slice(None), part), dot(inverse * w_scale[None, :], x))

        width = dividing_block(value_dim, MAX_BLOCK)
        parts = [pl.ds(offset, width) for offset in range(0, value_dim, width)]
        v = [load(v_ref, head, part).astype(jnp.float32) for part in parts]
        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x)) for x in v))
        largest = jnp.maximum(largest, SMALLEST)
        size_ref[head, tile] = largest
        solve = inverse * beta[None, :]
        for part, x in zip(parts, v, strict=True):
            store(u_ref, (slice(None), part), dot(solve, x * (1.0 / largest)))


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
        functools.partial(_kernel, per_channel=per_channel, tuning=tuning, interpret=interpret),
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
