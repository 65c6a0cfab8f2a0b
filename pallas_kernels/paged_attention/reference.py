"""Causal attention over paged keys and values, in plain XLA.

Keys and values live in pages [P, L, page, Hkv, D]; a sequence lists its pages in order. Queries
are regrouped into tiles of one sequence, and every tile walks its pages in blocks with a running
softmax, so the cost follows the longest context present and one compiled shape serves all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from ..precision import working_dtype
from ..ragged import make_tiles, or_outside

BLOCK_TOKENS = 128  # keys visited at once
NEVER = -1e30  # finite, so that a row with nothing visible stays free of NaN


def write_pages(
    pages: Float[Array, "P L page ..."],
    layer: int | Array,
    rows: Float[Array, "T ..."],
    kv_slots: Int32[Array, " T"],
) -> Float[Array, "P L page ..."]:
    """Rows written at `kv_slots` (page * page_size + offset); negative ones are dropped."""
    count, _, size = pages.shape[:3]
    page = or_outside(jnp.where(kv_slots >= 0, kv_slots // size, -1), count)
    at = pages.at[page, layer, kv_slots % size]
    return at.set(rows.astype(pages.dtype), mode="drop", unique_indices=True)


def gated(o: Float[Array, "*T H V"], gates: Float[Array, "*T H 2 V"]) -> Float[Array, "*T H V"]:
    """o times the sigmoid of gates[.., 1, :], in float32, cast back to o's dtype. Beside the gates
    are the queries, as a projection leaves both."""
    gate = gates[..., 1, :].astype(working_dtype(o))
    return (o.astype(gate.dtype) * jax.nn.sigmoid(gate)).astype(o.dtype)


def _attend(
    q: Float[Array, "N C Hq D"],
    positions: Int32[Array, "N C"],
    keys: Array,
    values: Array | None,
    layer: int | Array,
    page_table: Int32[Array, "N P"],
    longest: Array,
    scale: float,
    value_dim: int,
) -> Float[Array, "N C Hq V"]:
    """Tiles of queries; query (n, c) sees keys at positions 0..positions[n, c]."""
    tiles, rows, q_heads, dim = q.shape
    page_size, kv_heads = keys.shape[2:4]
    per_block = max(1, min(BLOCK_TOKENS // page_size, page_table.shape[1]))
    blocks = -(-page_table.shape[1] // per_block)
    table = jnp.pad(page_table, ((0, 0), (0, blocks * per_block - page_table.shape[1])))
    span = per_block * page_size
    work = working_dtype(q)
    q = q.reshape(tiles, rows, kv_heads, q_heads // kv_heads, dim).astype(work) * scale
    exact = lax.Precision.HIGHEST

    def body(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        page = jnp.maximum(lax.dynamic_slice_in_dim(table, index * per_block, per_block, 1), 0)
        k = keys[page, layer].reshape(tiles, span, kv_heads, dim).astype(work)
        v = k[..., :value_dim] if values is None else values[page, layer]
        v = v.reshape(tiles, span, kv_heads, value_dim).astype(work)
        at = index * span + jnp.arange(span, dtype=jnp.int32)
        visible = (at <= positions[:, :, None])[:, :, None, None, :]
        scores = jnp.einsum("nchgd,nshd->nchgs", q, k, precision=exact)
        scores = jnp.where(visible, scores, NEVER)
        high = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - high[..., None]), 0)
        # pages never written may hold anything: a zero weight must not meet a NaN
        seen = (at[None, :] <= positions.max(axis=1)[:, None])[:, :, None, None]
        v = jnp.where(seen, v, 0)
        shrink = jnp.exp(top - high)
        acc = acc * shrink[..., None]
        acc += jnp.einsum("nchgs,nshd->nchgd", weights, v, precision=exact)
        return high, total * shrink + weights.sum(axis=-1), acc

    shape = q.shape[:-1]
    carry = (
        jnp.full(shape, NEVER, work),
        jnp.zeros(shape, work),
        jnp.zeros((*shape, value_dim), work),
    )
    _, total, acc = lax.fori_loop(0, -(-longest // span), body, carry)
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    return out.reshape(tiles, rows, q_heads, value_dim)


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv V"] | None,
    layer: int | Array,
    positions: Int32[Array, " T"],
    cu_seqlens: Int32[Array, " N1"],
    page_table: Int32[Array, "N pages"],
    *,
    scale: float,
    value_dim: int | None = None,
    tile: int = 64,
) -> Float[Array, "T Hq V"]:
    """Packed queries of N sequences against their pages, which already hold their own keys.

    `values` None takes the first `value_dim` entries of each key as its value (MLA latents).
    """
    width = value_dim if value_dim is not None else keys.shape[-1]
    tiles = make_tiles(cu_seqlens, q.shape[0], tile)
    at = jnp.where(tiles.valid, positions[tiles.tokens], -1)
    longest = jnp.max(at) + 1
    tables = page_table[tiles.segment]
    out = _attend(q[tiles.tokens], at, keys, values, layer, tables, longest, scale, width)
    return out.reshape(-1, *out.shape[2:])[tiles.cell_of_token].astype(q.dtype)


def decode_paged_attention(
    q: Float[Array, "N Hq D"],
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv V"] | None,
    layer: int | Array,
    positions: Int32[Array, " N"],
    page_table: Int32[Array, "N pages"],
    *,
    scale: float,
    value_dim: int | None = None,
) -> Float[Array, "N Hq V"]:
    """One query for each of N sequences; a negative position sees nothing and gives zeros."""
    width = value_dim if value_dim is not None else keys.shape[-1]
    longest = jnp.max(positions) + 1
    at = positions[:, None]
    out = _attend(q[:, None], at, keys, values, layer, page_table, longest, scale, width)
    return out[:, 0].astype(q.dtype)
