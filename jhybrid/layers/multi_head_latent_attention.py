"""Multi-head latent attention without rotation (Kimi-Linear, Kimi-K3).

    q = x Wq or norm(x Wdown) Wup;  l | s = x Wkv, l normalised;  k = l Wk | s;  v = l Wv
    y = (softmax(q k^T) v * sigmoid(x Wgate)) Wo

The cache holds l | s, one row a token for all heads and so whole on every rank. Against pages the
heads' products with Wk and Wv move to the query and to the output, so that no key is expanded:

    q k^T = (q_nope Wk) l^T + q_shared s^T;   softmax(..) v = (softmax(..) l) Wv
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float

from pallas_kernels import decode_paged_attention, ragged_paged_attention, write_pages
from pallas_kernels.precision import working_dtype

from ..batch import Batch, Caches, DecodeBatch, DenseBatch, PrefillBatch
from ..config import LatentAttentionConfig
from ..params import scale, weight
from .gated_attention import attend_rows
from .linear import project, reduce_project
from .norm import Normed, rms_norm


@struct.dataclass
class LatentAttentionParams:
    """H heads of N own and S shared key channels and V value channels; latents of L channels.

    Queries come from D itself, or through an inner width R (then R takes the place of D in `q`).
    """

    q_down: Any  # [R, D] or None
    q_norm: Any  # [R] float32 or None
    q: Any  # [H, N + S, D or R]
    kv: Any  # [L + S, D]
    kv_norm: Any  # [L] float32
    kv_up: Any  # [H, N + V, L]
    gate: Any  # [H, V, D] or None
    out: Any  # [D, H, V]


def latent_attention_specs(hidden: int, c: LatentAttentionConfig) -> LatentAttentionParams:
    heads, whole, latent = (c.heads, "heads"), (hidden, None), (c.latent_dim, None)
    values, rank = (c.value_dim, None), c.query_low_rank
    expanded = (c.nope_dim + c.value_dim, None)
    inner = (rank or hidden, None)
    return LatentAttentionParams(
        q_down=weight(inner, whole, fan_in=hidden) if rank else None,
        q_norm=scale(rank) if rank else None,
        q=weight(heads, (c.query_dim, None), inner, fan_in=inner[0]),
        kv=weight((c.cache_dim, None), whole, fan_in=hidden),
        kv_norm=scale(c.latent_dim),
        kv_up=weight(heads, expanded, latent, fan_in=c.latent_dim),
        gate=weight(heads, values, whole, fan_in=hidden) if c.output_gate else None,
        out=weight(whole, heads, values, fan_in=c.heads * c.value_dim),
    )


def latent_attention(
    params: LatentAttentionParams,
    x: Float[Array, "*B D"] | Normed,
    caches: Caches | None,
    layer: int | Array,
    batch: Batch,
    config: LatentAttentionConfig,
    residual: Float[Array, "*B D"] | None = None,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """One mixer's result plus the residual; `layer` counts the full layers. Caches are None for a
    DenseBatch."""
    inner = x
    if params.q_down is not None:
        inner = rms_norm(project(x, params.q_down), params.q_norm, config.norm_eps)
    q = project(inner, params.q)  # [..., H, N + S]
    if isinstance(batch, DenseBatch):
        o = _attend_expanded(params, q, *_latents(params, x, config), batch, config)
    else:
        assert caches is not None
        caches = write_latents(params, x, caches, layer, batch, config)
        o = _attend_pages(params, q, caches.keys, layer, batch, config)
    if params.gate is not None:
        gate = project(x, params.gate, dtype=working_dtype(x))
        o = o.astype(gate.dtype) * jax.nn.sigmoid(gate)
    return reduce_project(o.astype(x.dtype), params.out, residual), caches


def write_latents(
    params: LatentAttentionParams,
    x: Float[Array, "T D"] | Normed,
    caches: Caches,
    layer: int | Array,
    batch: PrefillBatch | DecodeBatch,
    config: LatentAttentionConfig,
) -> Caches:
    """Of the mixer what later tokens read: the rows of all tokens, in their pages."""
    row = jnp.concatenate(_latents(params, x, config), axis=-1)
    keys = write_pages(caches.keys, layer, row[..., None, :], batch.kv_slots)
    return replace(caches, keys=keys)


def _latents(
    params: LatentAttentionParams, x: Float[Array, "*B D"] | Normed, config: LatentAttentionConfig
) -> tuple[Float[Array, "*B L"], Float[Array, "*B S"]]:
    """The latents, normalised, and the key channels that the heads share."""
    row = project(x, params.kv)
    latent, shared = jnp.split(row, [config.latent_dim], axis=-1)
    return rms_norm(latent, params.kv_norm, config.norm_eps), shared


def _attend_pages(
    params: LatentAttentionParams,
    q: Float[Array, "T H Dq"],
    keys: Float[Array, "P L page 1 Dl"],
    layer: int | Array,
    batch: PrefillBatch | DecodeBatch,
    config: LatentAttentionConfig,
) -> Float[Array, "T H V"]:
    """The absorbed form: every head attends to the same rows, which are keys and values at once."""
    scale, width = config.query_dim**-0.5, config.latent_dim
    k_up, v_up = jnp.split(params.kv_up, [config.nope_dim], axis=1)
    own = _per_head("thn,hnl->thl", q[..., : config.nope_dim], k_up)
    q = jnp.concatenate([own, q[..., config.nope_dim :]], axis=-1)
    match batch:
        case PrefillBatch():
            o = ragged_paged_attention(
                q,
                keys,
                None,
                layer,
                batch.positions,
                batch.cu_seqlens,
                batch.page_table,
                scale=scale,
                value_dim=width,
            )
        case DecodeBatch():
            o = decode_paged_attention(
                q,
                keys,
                None,
                layer,
                batch.positions,
                batch.page_table,
                scale=scale,
                value_dim=width,
            )
    return _per_head("thl,hvl->thv", o, v_up)


def _attend_expanded(
    params: LatentAttentionParams,
    q: Float[Array, "B T H Dq"],
    latent: Float[Array, "B T L"],
    shared: Float[Array, "B T S"],
    batch: DenseBatch,
    config: LatentAttentionConfig,
) -> Float[Array, "B T H V"]:
    """Keys and values of every head: cheaper than latents where all of them are used at once."""
    kv = project(latent, params.kv_up)  # [B, T, H, N + V]
    k, v = jnp.split(kv, [config.nope_dim], axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:-1], shared.shape[-1]))
    k = jnp.concatenate([k, shared], axis=-1)
    return attend_rows(q, k, v, batch, scale=config.query_dim**-0.5)


def _per_head(equation: str, x: Array, weight: Array) -> Array:
    """A product of each head with its own matrix, accumulated in float32."""
    work = working_dtype(x)
    return jnp.einsum(equation, x, weight, preferred_element_type=work).astype(x.dtype)
