"""Kimi Delta Attention mixer (Kimi-Linear, Kimi-K3): a delta rule that decays per key channel.

    q, k, v = silu(conv(x Wqkv));  z = (x Wdown) Wup + dt_bias;  beta = sigmoid(x Wb)
    g = -exp(A_log) softplus(z), or the safe gate  g = bound sigmoid(exp(A_log) z), bound < 0
    o = delta rule;  y = (norm(o) * sigmoid(x Wgate)) Wo

Everything is laid out by head; only the narrow inner projections are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float

from pallas_kernels import Gates, Part, gated_rms_norm
from pallas_kernels.precision import working_dtype

from ..batch import Batch, Caches, ReplayBatch
from ..config import LinearAttentionConfig
from ..params import ParamSpec, scale, weight
from .delta_rule import RuleInputs, delta_rule, project_inputs
from .linear import Factor, project, reduce_project
from .norm import Normed


@struct.dataclass
class KimiDeltaAttentionParams:
    """H heads of K key and V value channels; W = 2K + V convolved channels a head.

    R is the inner width of the decay gate. The output gate has an inner width G of its own, or
    projects D itself (then `gate_down` is None and G is D).
    """

    qkv: Any  # [H, W, D]: q | k | v
    conv: Any  # [H, W, J] float32
    decay_down: Any  # [R, D]
    decay_up: Any  # [H, K, R]
    beta: Any  # [H, D]
    A_log: Any  # [H] float32
    dt_bias: Any  # [H, K] float32
    gate_down: Any  # [G, D] or None
    gate_up: Any  # [H, V, G]
    norm: Any  # [V] float32
    out: Any  # [D, H, V]


def kimi_delta_attention_specs(
    hidden: int, c: LinearAttentionConfig, index: int = 0
) -> KimiDeltaAttentionParams:
    heads, whole = (c.key_heads, "key_heads"), (hidden, None)
    keys, values = (c.key_dim, None), (c.value_dim, None)
    width = (c.conv_width, None)
    assert c.low_rank is not None
    inner = (c.gate_low_rank or hidden, None)
    return KimiDeltaAttentionParams(
        qkv=weight(heads, width, whole, fan_in=hidden),
        conv=ParamSpec(
            (c.key_heads, c.conv_width, c.conv_size),
            ("key_heads", None, None),
            fan_in=c.conv_size,
            dtype=jnp.float32,  # as Kimi-K3 is published
        ),
        decay_down=weight((c.low_rank, None), whole, fan_in=hidden),
        decay_up=weight(heads, keys, (c.low_rank, None), fan_in=c.low_rank),
        beta=weight(heads, whole, fan_in=hidden),
        A_log=ParamSpec((c.key_heads,), ("key_heads",), "decay_scale", dtype=jnp.float32),
        dt_bias=ParamSpec(
            (c.key_heads, c.key_dim),
            ("key_heads", None),
            c.decay_bias,
            dtype=jnp.float32,
            index=index,
        ),
        gate_down=weight(inner, whole, fan_in=hidden) if c.gate_low_rank else None,
        gate_up=weight(heads, values, inner, fan_in=inner[0]),
        norm=scale(c.value_dim),
        out=weight(whole, heads, values, fan_in=c.value_heads * c.value_dim),
    )


def kimi_delta_attention(
    params: KimiDeltaAttentionParams,
    x: Float[Array, "*B D"] | Normed,
    caches: Caches | None,
    layer: int | Array,
    batch: Batch,
    config: LinearAttentionConfig,
    residual: Float[Array, "*B D"] | None = None,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """One mixer's result plus the residual; `layer` counts the linear layers. Caches are None for a
    DenseBatch."""
    inputs, caches = kimi_delta_attention_inputs(params, x, caches, layer, batch, config)
    o, caches = delta_rule(inputs, caches, layer, batch, config)
    return kimi_delta_attention_output(params, o, x, config, residual), caches


def kimi_delta_attention_inputs(
    params: KimiDeltaAttentionParams,
    x: Float[Array, "*B D"] | Normed,
    caches: Caches | None,
    layer: int | Array,
    batch: Batch | ReplayBatch,
    config: LinearAttentionConfig,
    into: Part | None = None,
) -> tuple[RuleInputs, Caches | None]:
    """What the recurrence reads."""
    work = working_dtype(x)
    factors = Factor(params.decay_down[None]), Factor(params.beta[None], work)
    where = (caches, layer, batch, into)
    qkv, _, (inner, beta), caches = project_inputs(x, params.qkv, params.conv, factors, *where)
    z = project(inner, params.decay_up, dtype=work)  # [..., H, K]
    gates = Gates(z, beta, params.A_log, params.dt_bias)
    return RuleInputs(qkv, gates), caches


def kimi_delta_attention_output(
    params: KimiDeltaAttentionParams,
    o: Float[Array, "*N H V"],
    x: Float[Array, "*B D"] | Normed,
    config: LinearAttentionConfig,
    residual: Float[Array, "*B D"] | None = None,
    start: int | Array | None = None,
) -> Float[Array, "*B D"]:
    """The recurrence's result normalised, gated by the mixer's input x and projected back, plus the
    residual."""
    work = working_dtype(x)
    inner = x if params.gate_down is None else project(x, params.gate_down)
    gate = project(inner, params.gate_up, dtype=work)  # [..., H, V]
    norm = (params.norm, gate, 0, config.norm_eps)
    o = gated_rms_norm(o, *norm, jax.nn.sigmoid, x.dtype, start)
    return reduce_project(o, params.out, residual)
