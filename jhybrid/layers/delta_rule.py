"""The two recurrences of linear-attention mixers, with what they carry between steps.

Each is one call whatever the batch: from zero, over packed segments, or one token a sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels import (
    Activation,
    Gates,
    Part,
    decode_causal_conv1d,
    decode_gated_delta_rule,
    dense_causal_conv1d,
    dense_gated_delta_rule,
    ragged_causal_conv1d,
    ragged_gated_delta_rule,
    unpack,
)

from ..batch import Batch, Caches, DecodeBatch, DenseBatch, PrefillBatch, ReplayBatch
from ..config import LinearAttentionConfig

FORGET = -60.0  # a log-decay that leaves nothing of a state in float32


class RuleInputs(NamedTuple):
    """What the recurrence of one layer reads; W is the config's `conv_width`."""

    qkv: Float[Array, "*N Hk W"]
    gates: Gates


def convolve(
    x: Float[Array, "*B Hk X"],
    conv_weight: Float[Array, "Hk W J"],
    caches: Caches | None,
    layer: int | Array,
    batch: Batch | ReplayBatch,
    into: Part | None = None,
) -> tuple[Float[Array, "*N Hk W"], Caches | None]:
    """Short convolution with silu of the first W channels of every key head, windows carried as
    the batch asks. Packed tokens may go `into` an array of several layers'."""
    match batch:
        case DenseBatch():
            return dense_causal_conv1d(x, conv_weight), caches
        case PrefillBatch() | ReplayBatch():
            assert caches is not None
            y, pool = ragged_causal_conv1d(
                x, conv_weight, caches.conv, layer, batch.segments, into=into
            )
        case DecodeBatch():
            assert caches is not None
            y, pool = decode_causal_conv1d(x, conv_weight, caches.conv, layer, batch.state_slots)
    return y, replace(caches, conv=pool)


def delta_rule(
    inputs: RuleInputs,
    caches: Caches | None,
    layer: int | Array,
    batch: Batch,
    config: LinearAttentionConfig,
) -> tuple[Float[Array, "*B H V"], Caches | None]:
    """The recurrence, states carried as the batch asks."""
    qkv, gates = inputs
    activation = gate_activation(config)
    match batch:
        case DenseBatch():
            q, k, v, g, beta = unpack(qkv, gates, config.key_dim, activation)
            if batch.state_cut is not None:
                at_cut = jnp.arange(g.shape[1]) == batch.state_cut[:, None]
                g = jnp.where(at_cut.reshape(at_cut.shape + (1,) * (g.ndim - 2)), FORGET, g)
            return dense_gated_delta_rule(q, k, v, g, beta), caches
        case PrefillBatch():
            assert caches is not None
            o, pool = ragged_gated_delta_rule(
                qkv,
                gates,
                caches.recurrent,
                layer,
                batch.segments,
                activation=activation,
                sequences=batch.most_sequences,
            )
        case DecodeBatch():
            assert caches is not None
            o, pool = decode_gated_delta_rule(
                qkv, gates, caches.recurrent, layer, batch.state_slots, activation=activation
            )
    return o, replace(caches, recurrent=pool)


def gate_activation(config: LinearAttentionConfig) -> Activation:
    """How the ops turn this model's logits into decays and strengths."""
    bound = config.gate_lower_bound if config.gate == "safe" else None
    return Activation(lower_bound=bound, beta_scale=config.beta_scale)
