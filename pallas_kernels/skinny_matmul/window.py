"""A short convolution at the end of a product's programs.

In a decode step a channel of a row belongs to one program, and so does its window: the program asks
for it before it streams its weights, and shifts it when it has its sums.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..causal_conv1d.taps import silu_sum
from ..triton import iota


class Convolution:
    """Of the block of outputs that starts at `column`, for rows [R] whose sums are [R, outputs].

    `refs` are the pool, the layer [1], the slots [M] and the weights [C, J]; `sizes` the channels
    of a head, and those that are convolved.
    """

    def __init__(
        self, refs: Any, sizes: tuple[int, int], column: Array, outputs: int,
        rows: Array, valid: Array, interpret: bool,
    ) -> None:  # fmt: skip
        pool_ref, layer_ref, slot_ref, weight_ref = refs
        per_head, width = sizes
        inside = column % per_head
        self.convolved, self.interpret = inside < width, interpret
        self.rows, self.valid = rows, valid
        self.start = jnp.where(self.convolved, column // per_head * width + inside, 0)
        slots = plt.load(slot_ref.at[rows], mask=valid, other=-1)
        self.known = (slots >= 0) & valid & self.convolved
        # Nobody's slot for rows that have none: interpreted, a masked store writes what was there.
        self.slots, self.layer = jnp.where(self.known, slots, pool_ref.shape[0]), layer_ref[0]
        self.shape = rows.shape[0], outputs
        zero = jnp.zeros((), pool_ref.dtype)
        self.inputs = [
            plt.load(self._place(pool_ref, r), mask=self._mask, other=zero)
            for r in range(pool_ref.shape[2])
        ]
        taps = weight_ref.shape[1]
        w = weight_ref[pl.ds(self.start, outputs), pl.ds(0, taps)].astype(jnp.float32)
        tap = iota((outputs, taps), 1)
        self.weights = [jnp.sum(jnp.where(tap == j, w, 0.0), axis=1) for j in range(taps)]

    @property
    def _mask(self) -> Array:
        return jnp.broadcast_to(self.known[:, None], self.shape)

    def _place(self, pool_ref: Any, row: int) -> Any:
        channels = self.start + iota(self.shape, 1)
        slots = jnp.broadcast_to(self.slots[:, None], self.shape)
        return pool_ref.at[slots, self.layer, row, channels]

    def finish(self, x: Array, out_ref: Any, new_pool_ref: Any) -> None:
        """Stores the convolved channels of x, the rounded sums, and shifts the windows."""
        inputs = [*(y.astype(x.dtype) for y in self.inputs), x]
        for row, value in enumerate(inputs[1:]):
            place = self._place(new_pool_ref, row)
            plt.store(place, value.astype(new_pool_ref.dtype), mask=self._mask)
        weights = [jnp.broadcast_to(w, self.shape) for w in self.weights]
        y = silu_sum(inputs, weights, self.interpret).astype(out_ref.dtype)
        channels = self.start + iota(self.shape, 1)
        rows = jnp.broadcast_to(self.rows[:, None], self.shape)
        mask = jnp.broadcast_to((self.valid & self.convolved)[:, None], self.shape)
        plt.store(out_ref.at[rows, channels], y, mask=mask)
