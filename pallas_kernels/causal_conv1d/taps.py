"""What both kernels share: a block of channels, its weights, and one step of the convolution."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import iota

LOG2_E = math.log2(math.e)


class Channels:
    """One program's block of channels; the last block may reach past the end."""

    def __init__(self, block: Array, width: int, count: int) -> None:
        self.width = width
        self._first = block * width
        self.slice = pl.ds(self._first, width)
        self._inside = self._first + iota((width,), 0) < count

    def load(self, place: Any, valid: Array | bool, dtype: Any) -> Array:
        """[channels] at `place`, zeros where not valid."""
        x = plt.load(place, mask=self._inside & valid, other=jnp.zeros((), place.dtype))
        return x.astype(dtype)

    def store(self, place: Any, value: Array, valid: Array | bool) -> None:
        plt.store(place, value.astype(place.dtype), mask=self._inside & valid)

    def weights(self, weight_ref: Any) -> list[Array]:
        """One float32 array [channels] a tap.

        The taps of a channel lie side by side: read together, then taken apart. Each by itself
        would be read with gaps, at many times the cost of a row of inputs.
        """
        taps = weight_ref.shape[1]
        wide = pl.next_power_of_2(taps)
        column = iota((self.width, wide), 1)
        mask = (self._first + iota((self.width, wide), 0) < weight_ref.shape[0]) & (column < taps)
        place = weight_ref.at[self.slice, pl.ds(0, wide)]
        w = plt.load(place, mask=mask, other=jnp.zeros((), weight_ref.dtype)).astype(jnp.float32)
        return [jnp.sum(jnp.where(column == j, w, 0.0), axis=1) for j in range(taps)]


def silu_sum(inputs: list[Array], weights: list[Array]) -> Array:
    """silu of the inputs times their taps, oldest first, in float32."""
    total = inputs[0].astype(jnp.float32) * weights[0]
    for x, w in zip(inputs[1:], weights[1:], strict=True):
        total = total + x.astype(jnp.float32) * w
    return total / (1.0 + jnp.exp2(total * -LOG2_E))  # exp takes three times the instructions
