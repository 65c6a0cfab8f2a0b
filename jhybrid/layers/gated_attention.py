"""Softmax attention with grouped queries, q/k norm, partial rotation and a sigmoid output gate.

Each refinement is there where the config (and so the parameters) has it: Qwen's full layers have
all of them, OLMo-Hybrid's only a norm over the whole projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels import decode_paged_attention, ragged_paged_attention, write_pages
from pallas_kernels.precision import working_dtype

from ..batch import Batch, Caches, DecodeBatch, DenseBatch, PrefillBatch
from ..config import AttentionConfig
from ..params import ParamSpec, scale, weight
from ..sharding import AXIS
from .linear import Factor, project_all, reduce_project
from .norm import Normed, rms_norm
from .rope import rotate


@struct.dataclass
class GatedAttentionParams:
    """G is 2 with an output gate (query, gate), else 1."""

    q: Any  # [H, G, Dh, D]
    k: Any  # [Hkv, Dh, D]
    v: Any  # [Hkv, Dh, D]
    q_norm: Any  # [Dh] or [H, Dh] float32, or None
    k_norm: Any  # [Dh] or [Hkv, Dh] float32, or None
    out: Any  # [D, H, Dh]


def gated_attention_specs(hidden: int, c: AttentionConfig) -> GatedAttentionParams:
    heads, kv_heads, dim = (c.heads, "heads"), (c.kv_heads, "kv_heads"), (c.head_dim, None)
    whole = (hidden, None)

    def norm(count: int, axis: str) -> ParamSpec | None:
        if c.qk_norm == "full":
            return ParamSpec((count, c.head_dim), (axis, None), "ones", dtype=jnp.float32)
        return scale(c.head_dim) if c.qk_norm == "head" else None

    return GatedAttentionParams(
        q=weight(heads, (1 + c.output_gate, None), dim, whole, fan_in=hidden),
        k=weight(kv_heads, dim, whole, fan_in=hidden),
        v=weight(kv_heads, dim, whole, fan_in=hidden),
        q_norm=norm(c.heads, "heads"),
        k_norm=norm(c.kv_heads, "kv_heads"),
        out=weight(whole, heads, dim, fan_in=c.heads * c.head_dim),
    )


def gated_attention(
    params: GatedAttentionParams,
    x: Float[Array, "*B D"] | Normed,
    caches: Caches | None,
    layer: int,
    batch: Batch,
    config: AttentionConfig,
    norm_eps: float,
    residual: Float[Array, "*B D"] | None = None,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """One mixer's result plus the residual; `layer` counts the full layers. Caches are None for a
    DenseBatch."""
    both, k, v = project_all(x, *(Factor(w[None]) for w in (params.q, params.k, params.v)))
    q = both[..., 0, :]  # of [..., H, G, Dh]
    if params.q_norm is not None:
        q = _qk_norm(q, params.q_norm, norm_eps)
        k = _qk_norm(k, params.k_norm, norm_eps)
    if isinstance(batch, DenseBatch):
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    else:
        positions = batch.positions
    q = rotate(q, positions, config.rotary_dim, config.rope_theta)
    k = rotate(k, positions, config.rotary_dim, config.rope_theta)
    o, caches = attend(q, k, v, caches, layer, batch, scale=config.head_dim**-0.5)
    if config.output_gate:
        gate = both[..., 1, :].astype(working_dtype(x))
        o = o.astype(gate.dtype) * jax.nn.sigmoid(gate)
    return reduce_project(o.astype(x.dtype), params.out, residual), caches


def _qk_norm(x: Array, norm: Array, eps: float) -> Array:
    """Per head (weight [Dh]), or over all heads of all ranks together (weight [H, Dh])."""
    if norm.ndim == 1:
        return rms_norm(x, norm, eps)
    work = x.astype(working_dtype(x))
    total = lax.psum(jnp.sum(work * work, axis=(-2, -1), keepdims=True), AXIS)
    count = norm.size * lax.axis_size(AXIS)
    return (work * lax.rsqrt(total / count + eps) * norm).astype(x.dtype)


def attend(
    q: Float[Array, "*B H D"],
    k: Float[Array, "*B Hkv D"],
    v: Float[Array, "*B Hkv D"],
    caches: Caches | None,
    layer: int,
    batch: Batch,
    *,
    scale: float,
) -> tuple[Float[Array, "*B H D"], Caches | None]:
    """Write this step's keys and values, then attend to everything up to each query."""
    if isinstance(batch, DenseBatch):
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True), caches
    assert caches is not None and caches.values is not None
    keys = write_pages(caches.keys, layer, k, batch.kv_slots)
    values = write_pages(caches.values, layer, v, batch.kv_slots)
    match batch:
        case PrefillBatch():
            o = ragged_paged_attention(
                q,
                keys,
                values,
                layer,
                batch.positions,
                batch.cu_seqlens,
                batch.page_table,
                scale=scale,
                whole_prompt=batch.whole_prompt,
            )
        case DecodeBatch():
            o = decode_paged_attention(
                q, keys, values, layer, batch.positions, batch.page_table, scale=scale
            )
    return o, replace(caches, keys=keys, values=values)
