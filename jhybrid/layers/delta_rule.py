"""The two recurrences of linear-attention mixers, with what they carry between steps.

Each is one call whatever the batch: from zero, over packed segments, or one token a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels import (
    Activation,
    Gates,
    Part,
    Window,
    decode_gated_delta_rule,
    dense_causal_conv1d,
    dense_gated_delta_rule,
    ragged_causal_conv1d,
    ragged_gated_delta_rule,
    unpack,
)

from ..batch import Batch, Caches, DecodeBatch, DenseBatch, PrefillBatch, ReplayBatch
from ..config import LinearAttentionConfig
from .linear import Factor, project_all, project_and_convolve
from .norm import Normed

FORGET = -60.0  # a log-decay that leaves nothing of a state in float32


class RuleInputs(NamedTuple):
    """What the recurrence of one layer reads; W is the config's `conv_width`."""

    qkv: Float[Array, "*N Hk W"]
    gates: Gates


def project_inputs(
    x: Float[Array, "*B D"] | Normed,
    weight: Float[Array, "Hk X D"],
    conv_weight: Float[Array, "Hk W J"],
    factors: Sequence[Factor],
    caches: Caches | None,
    layer: int | Array,
    batch: Batch | ReplayBatch,
    into: Part | None = None,
) -> tuple[Float[Array, "*N Hk W"], Float[Array, "*B Hk X"], list[Array], Caches | None]:
    """x W, of every key head the first W channels behind a short convolution with silu, windows
    carried as the batch asks; x W itself, of which other channels are read; and x times the other
    factors. Packed tokens may go `into` an array of several layers'."""
    if isinstance(batch, DecodeBatch):
        assert caches is not None
        window = Window(conv_weight, caches.conv, layer, batch.state_slots)
        mixed, y, pool, *others = project_and_convolve(x, weight, window, *factors)
        return y, mixed, others, replace(caches, conv=pool)
    mixed, *others = project_all(x, Factor(weight[None]), *factors)
    if isinstance(batch, DenseBatch):
        return dense_causal_conv1d(mixed, conv_weight), mixed, others, caches
    assert caches is not None
    at = (conv_weight, caches.conv, layer, batch.segments)
    y, pool = ragged_causal_conv1d(mixed, *at, into=into)
    return y, mixed, others, replace(caches, conv=pool)


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
