"""The two recurrences of linear-attention mixers, with what they carry between steps.

Each is one call whatever the batch: from zero, over packed segments, or one token a sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Float

from pallas_kernels import (
    chunk_gated_delta_rule,
    decode_causal_conv1d,
    decode_gated_delta_rule,
    dense_causal_conv1d,
    ragged_causal_conv1d,
    ragged_gated_delta_rule,
)

from ..batch import Batch, Caches, DecodeBatch, DenseBatch, PrefillBatch, ReplayBatch


class RuleInputs(NamedTuple):
    """What the recurrence of one layer reads. g is per head or per key channel."""

    q: Float[Array, "*B Hk K"]
    k: Float[Array, "*B Hk K"]
    v: Float[Array, "*B H V"]
    g: Float[Array, ...]
    beta: Float[Array, "*B H"]


def convolve(
    x: Float[Array, "*B C"],
    conv_weight: Float[Array, "C J"],
    caches: Caches | None,
    layer: int,
    batch: Batch | ReplayBatch,
) -> tuple[Float[Array, "*B C"], Caches | None]:
    """Short convolution with silu, windows carried as the batch asks."""
    match batch:
        case DenseBatch():
            return dense_causal_conv1d(x, conv_weight), caches
        case PrefillBatch() | ReplayBatch():
            assert caches is not None
            y, pool = ragged_causal_conv1d(x, conv_weight, caches.conv, layer, batch.segments)
        case DecodeBatch():
            assert caches is not None
            y, pool = decode_causal_conv1d(x, conv_weight, caches.conv, layer, batch.state_slots)
    return y, replace(caches, conv=pool)


def delta_rule(
    inputs: RuleInputs,
    caches: Caches | None,
    layer: int,
    batch: Batch,
) -> tuple[Float[Array, "*B H V"], Caches | None]:
    """The recurrence, states carried as the batch asks."""
    match batch:
        case DenseBatch():
            o, _ = jax.vmap(chunk_gated_delta_rule)(*inputs)
            return o, caches
        case PrefillBatch():
            assert caches is not None
            pool = caches.recurrent
            o, pool = ragged_gated_delta_rule(*inputs, pool, layer, batch.segments)
        case DecodeBatch():
            assert caches is not None
            pool = caches.recurrent
            o, pool = decode_gated_delta_rule(*inputs, pool, layer, batch.state_slots)
    return o, replace(caches, recurrent=pool)
