"""What both kernels share: a block of channels, its weights, and one step of the convolution."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import iota, multiply_add, reciprocal

LOG2_E = math.log2(math.e)


class Channels:
    """One program's block of the channels of a head."""

    def __init__(self, block: Array, width: int, weight_ref: Any) -> None:
        blocks = weight_ref.shape[1] // width
        self.head, self.width = block // blocks, width
        self.slice = pl.ds(block % blocks * width, width)

    def load(self, ref: Any, *index: Array, valid: Array | bool = True) -> Array:
        """ref[*index, head, channels], zeros where not valid."""
        place = ref.at[(*index, self.head, self.slice)]
        mask = jnp.broadcast_to(jnp.asarray(valid), (self.width,))
        return plt.load(place, mask=mask, other=jnp.zeros((), ref.dtype))

    def store(self, ref: Any, *index: Array, value: Array, valid: Array | bool = True) -> None:
        place = ref.at[(*index, self.head, self.slice)]
        mask = jnp.broadcast_to(jnp.asarray(valid), (self.width,))
        plt.store(place, value.astype(ref.dtype), mask=mask)

    def weights(self, weight_ref: Any) -> list[Array]:
        """One float32 array [channels] a tap.

        The taps of a channel lie side by side: read together, then taken apart. Each by itself
        would be read with gaps, at many times the cost of a row of inputs.
        """
        taps = weight_ref.shape[2]
        wide = pl.next_power_of_2(taps)
        column = iota((self.width, wide), 1)
        place = weight_ref.at[self.head, self.slice, pl.ds(0, wide)]
        w = plt.load(place, mask=column < taps, other=jnp.zeros((), weight_ref.dtype))
        w = w.astype(jnp.float32)
        return [jnp.sum(jnp.where(column == j, w, 0.0), axis=1) for j in range(taps)]


def silu_sum(inputs: list[Array], weights: list[Array], interpret: bool) -> Array:
    """silu of the inputs times their taps, oldest first, in float32.

    In the fewest instructions: a prefill is bound by their number as much as by bytes.
    """
    total = inputs[0].astype(jnp.float32) * weights[0]
    for x, w in zip(inputs[1:], weights[1:], strict=True):
        total = multiply_add(x.astype(jnp.float32), w, total, interpret)
    return total * reciprocal(1.0 + jnp.exp2(total * -LOG2_E), interpret)
