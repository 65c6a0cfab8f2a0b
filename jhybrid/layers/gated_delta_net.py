"""Gated DeltaNet mixer (Qwen3-Next, Qwen3.5/3.6, OLMo-Hybrid).

    q, k, v = silu(conv(x Wqkv));  g = -exp(A_log) softplus(x Wa + dt_bias);  beta = sigmoid(x Wb)
    o = gated delta rule;  y = (norm(o) * silu(x Wz)) Wo

Everything is laid out by key head, so that cutting the key heads over ranks cuts the layer.
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
from .linear import Factor, reduce_project
from .norm import Normed


@struct.dataclass
class GatedDeltaNetParams:
    """Hk key heads, R value heads each; W = 2K + R V convolved channels a key head."""

    qkvz: Any  # [Hk, W + R V, D]: q | k | v of each value head | z of each value head
    ba: Any  # [2, Hk, R, D]: beta's logit, decay's input
    conv: Any  # [Hk, W, J]
    A_log: Any  # [Hk, R] float32
    dt_bias: Any  # [Hk, R] float32
    norm: Any  # [V] float32
    out: Any  # [D, Hk, R, V]


def gated_delta_net_specs(
    hidden: int, c: LinearAttentionConfig, index: int = 0
) -> GatedDeltaNetParams:
    heads, group = (c.key_heads, "key_heads"), (c.group, None)
    gate_shape, gate_axes = (c.key_heads, c.group), ("key_heads", None)
    width = c.conv_width + c.group * c.value_dim
    return GatedDeltaNetParams(
        qkvz=weight(heads, (width, None), (hidden, None), fan_in=hidden),
        ba=weight((2, None), heads, group, (hidden, None), fan_in=hidden),
        conv=weight(heads, (c.conv_width, None), (c.conv_size, None), fan_in=c.conv_size),
        A_log=ParamSpec(gate_shape, gate_axes, "decay_scale", dtype=jnp.float32),
        dt_bias=ParamSpec(gate_shape, gate_axes, c.decay_bias, dtype=jnp.float32, index=index),
        norm=scale(c.value_dim),
        out=weight(
            (hidden, None), heads, group, (c.value_dim, None), fan_in=c.value_heads * c.value_dim
        ),
    )


def gated_delta_net(
    params: GatedDeltaNetParams,
    x: Float[Array, "*B D"] | Normed,
    caches: Caches | None,
    layer: int | Array,
    batch: Batch,
    config: LinearAttentionConfig,
    residual: Float[Array, "*B D"] | None = None,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """One mixer's result plus the residual; `layer` counts the linear layers. Caches are None for a
    DenseBatch."""
    inputs, mixed, caches = gated_delta_net_inputs(params, x, caches, layer, batch, config)
    o, caches = delta_rule(inputs, caches, layer, batch, config)
    return gated_delta_net_output(params, o, mixed, config, residual), caches


def gated_delta_net_inputs(
    params: GatedDeltaNetParams,
    x: Float[Array, "*B D"] | Normed,
    caches: Caches | None,
    layer: int | Array,
    batch: Batch | ReplayBatch,
    config: LinearAttentionConfig,
    into: Part | None = None,
) -> tuple[RuleInputs, Float[Array, "*B Hk X"], Caches | None]:
    """What the recurrence reads, and the projection whose last channels are the output gate z,
    which waits for the recurrence's result."""
    factors = (Factor(params.ba, working_dtype(x)),)
    where = (caches, layer, batch, into)
    qkv, mixed, found, caches = project_inputs(x, params.qkvz, params.conv, factors, *where)
    beta, decay = (y.reshape(*x.shape[:-1], -1) for y in found)
    gates = Gates(decay, beta, params.A_log.reshape(-1), params.dt_bias.reshape(-1))
    return RuleInputs(qkv, gates), mixed, caches


def gated_delta_net_output(
    params: GatedDeltaNetParams,
    o: Float[Array, "*N H V"],
    mixed: Float[Array, "*B Hk X"],
    config: LinearAttentionConfig,
    residual: Float[Array, "*B D"] | None = None,
    start: int | Array | None = None,
) -> Float[Array, "*B D"]:
    """The recurrence's result normalised, gated and projected back to the model's width, plus the
    residual."""
    norm = (params.norm, mixed, config.conv_width, config.norm_eps)
    o = gated_rms_norm(o, *norm, jax.nn.silu, mixed.dtype, start)
    o = o.reshape(*mixed.shape[:-1], config.group, config.value_dim)
    return reduce_project(o, params.out, residual)
