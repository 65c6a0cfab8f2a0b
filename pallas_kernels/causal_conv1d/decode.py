"""One token for each of N sequences, whose windows are shifted in their slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ..triton import triton_call
from .taps import Channels, silu_sum
from .tuning import ConvTuning


def _kernel(
    layer_ref: Any,
    slot_ref: Any,
    x_ref: Any,
    weight_ref: Any,
    pool_ref: Any,
    y_ref: Any,
    new_pool_ref: Any,
    *,
    tuning: ConvTuning,
) -> None:
    block, batch = pl.program_id(0), pl.program_id(1)
    count, width = x_ref.shape[0], weight_ref.shape[1] - 1
    channels = Channels(block, tuning.channels, x_ref.shape[1])
    weights = channels.weights(weight_ref)
    layer = layer_ref[0]
    for n in range(tuning.sequences):
        token = batch * tuning.sequences + n
        valid = token < count
        token = jnp.minimum(token, count - 1)
        slot = slot_ref[token]
        known = valid & (slot >= 0)
        slot = jnp.maximum(slot, 0)
        inputs = [
            channels.load(
                pool_ref.at[slot, layer, jnp.int32(r), channels.slice], known, x_ref.dtype
            )
            for r in range(width)
        ]
        inputs.append(channels.load(x_ref.at[token, channels.slice], valid, x_ref.dtype))
        channels.store(y_ref.at[token, channels.slice], silu_sum(inputs, weights), valid)
        for r, value in enumerate(inputs[1:]):
            channels.store(new_pool_ref.at[slot, layer, jnp.int32(r), channels.slice], value, known)


def decode(
    x: Array,
    weight: Array,
    pool: Array,
    layer: int | Array,
    slots: Array,
    *,
    tuning: ConvTuning | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`decode_causal_conv1d` as a kernel; the pool is updated in place when donated."""
    tuning = tuning or ConvTuning.decode(x.shape[0])
    call = triton_call(
        functools.partial(_kernel, tuning=tuning),
        "causal_conv1d_decode",
        (pl.cdiv(x.shape[1], tuning.channels), pl.cdiv(x.shape[0], tuning.sequences)),
        (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        warps=tuning.warps,
        aliases={4: 1},
        interpret=interpret,
    )
    y, pool = call(jnp.asarray([layer], jnp.int32), slots, x, weight, pool)
    return y, pool
