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

from pallas_kernels import (
    decode_paged_attention,
    gated,
    ragged_paged_attention,
    rotate,
    rotate_and_write,
)
from pallas_kernels.precision import working_dtype

from ..batch import Batch, Caches, DecodeBatch, DenseBatch, PrefillBatch
from ..config import AttentionConfig
from ..params import ParamSpec, scale, weight
from ..sharding import AXIS
from .linear import Factor, project_all, reduce_project
from .norm import Normed, rms_norm

CUT_LOGIT = 256.0  # how far below all others the logit of a key before a cut is
CUT_CHANNELS = 8


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
    layer: int | Array,
    batch: Batch,
    config: AttentionConfig,
    norm_eps: float,
    residual: Float[Array, "*B D"] | None = None,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """One mixer's result plus the residual; `layer` counts the full layers. Caches are None for a
    DenseBatch."""
    both, k, v = project_all(x, *(Factor(w[None]) for w in (params.q, params.k, params.v)))
    q = both  # [..., H, G, Dh]: a gate may stand beside each query
    if config.qk_norm == "full":
        q = _norm_of_all(both[..., :1, :], params.q_norm[:, None], norm_eps)
        k = _norm_of_all(k, params.k_norm, norm_eps)
    norms = _norms_of_heads(params, config)
    turn = (config.rotary_dim, config.rope_theta)
    if isinstance(batch, DenseBatch):
        q = q[..., 0, :]
        if norms is not None:
            q, k = (rms_norm(*y, norm_eps) for y in zip((q, k), norms, strict=True))
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        q, k = (rotate(y, positions, *turn) for y in (q, k))
        o = attend_rows(q, k, v, batch, scale=config.head_dim**-0.5)
    else:
        assert caches is not None and caches.values is not None
        where = (caches.keys, caches.values, layer, batch.kv_slots)
        q, keys, values = rotate_and_write(q, k, v, norms, norm_eps, batch.positions, *turn, *where)
        assert q is not None
        caches = replace(caches, keys=keys, values=values)
        gates = both if config.output_gate else None
        o = _attend(q, caches, layer, batch, config.head_dim**-0.5, gates)
    if config.output_gate and not isinstance(batch, DecodeBatch):
        o = gated(o, both)
    return reduce_project(o.astype(x.dtype), params.out, residual), caches


def write_keys(
    params: GatedAttentionParams,
    x: Float[Array, "T D"] | Normed,
    caches: Caches,
    layer: int | Array,
    batch: PrefillBatch,
    config: AttentionConfig,
    norm_eps: float,
) -> Caches:
    """Of the mixer what later tokens read: the keys and values of all tokens, in their pages."""
    assert caches.values is not None
    k, v = project_all(x, *(Factor(w[None]) for w in (params.k, params.v)))
    if config.qk_norm == "full":
        k = _norm_of_all(k, params.k_norm, norm_eps)
    norms, turn = _norms_of_heads(params, config), (config.rotary_dim, config.rope_theta)
    where = (caches.keys, caches.values, layer, batch.kv_slots)
    _, keys, values = rotate_and_write(None, k, v, norms, norm_eps, batch.positions, *turn, *where)
    return replace(caches, keys=keys, values=values)


def _norms_of_heads(
    params: GatedAttentionParams, config: AttentionConfig
) -> tuple[Array, Array] | None:
    return (params.q_norm, params.k_norm) if config.qk_norm == "head" else None


def _norm_of_all(x: Array, norm: Array, eps: float) -> Array:
    """Over all heads of all ranks together: x [..., *H, Dh], weight [*H, Dh]."""
    work = x.astype(working_dtype(x))
    axes = tuple(range(x.ndim - norm.ndim, x.ndim))
    total = lax.psum(jnp.sum(work * work, axis=axes, keepdims=True), AXIS)
    count = norm.size * lax.axis_size(AXIS)
    return (work * lax.rsqrt(total / count + eps) * norm).astype(x.dtype)


def _attend(
    q: Float[Array, "T H D"],
    caches: Caches,
    layer: int | Array,
    batch: PrefillBatch | DecodeBatch,
    scale: float,
    gates: Float[Array, "T H 2 D"] | None,
) -> Float[Array, "T H D"]:
    """Every query against all of its sequence up to itself, whose keys are in their pages. A decode
    step's results are gated."""
    keys, values = caches.keys, caches.values
    match batch:
        case PrefillBatch():
            return ragged_paged_attention(
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
            return decode_paged_attention(
                q, keys, values, layer, batch.positions, batch.page_table, scale=scale, gates=gates
            )


def attend_rows(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv V"],
    batch: DenseBatch,
    *,
    scale: float,
) -> Float[Array, "B T H V"]:
    """Causal attention within whole rows.

    A cut is made by channels that only a query behind it and a key before it have: one fused
    kernel then serves rows with and without. The op wants one width for all three.
    """
    values = v.shape[-1]
    if batch.key_cut is not None:
        behind = jnp.arange(q.shape[1]) >= batch.key_cut[:, None]
        depth = (CUT_LOGIT / (CUT_CHANNELS * scale)) ** 0.5
        q, k = (
            _append(x, jnp.where(b, c, 0)) for x, b, c in ((q, behind, -depth), (k, ~behind, depth))
        )
    width = max(q.shape[-1], values)
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),)) for x in (q, k, v))
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    o = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, implementation="cudnn" if fused else None
    )
    return o[..., :values]


def _append(x: Float[Array, "B T H D"], channel: Float[Array, "B T"]) -> Array:
    shape = (*x.shape[:3], CUT_CHANNELS)
    more = jnp.broadcast_to(channel.astype(x.dtype)[:, :, None, None], shape)
    return jnp.concatenate([x, more], axis=-1)
