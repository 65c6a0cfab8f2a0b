"""Which tiles a block of threads takes, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .tuning import TiledTuning

PAIR = "pair"  # axis of two blocks that share their loads of weights


@dataclass(frozen=True)
class Walk:
    """The tiles of a block, in the order in which it takes them."""

    blocks: int  # or pairs of them
    me: Array
    wanted: Array  # (pairs of) tiles of rows with a wanted row
    rows: int  # (pairs of) tiles of rows
    columns: int  # tiles of columns
    width: int  # of a tile of results
    tuning: TiledTuning

    @classmethod
    def of(cls, count: Array, x: Any, weights: Any, tuning: TiledTuning) -> Walk:
        width = tuning.columns // weights.shape[0]
        wanted = lax.div(count + (tuning.together - 1), jnp.int32(tuning.together))
        return cls(
            tuning.walkers, lax.axis_index("blocks"), wanted, -(-x.shape[0] // tuning.together),
            weights.shape[1] // width, width, tuning,
        )  # fmt: skip

    def steps(self, tiles: Array) -> Array:
        """How many of so many (pairs of) tiles are this block's."""
        return lax.div(tiles - self.me + (self.blocks - 1), jnp.int32(self.blocks))

    @property
    def wanted_steps(self) -> Array:
        return self.steps(self.wanted * self.columns)

    @property
    def other_steps(self) -> Array:
        return self.steps((self.rows - self.wanted) * self.columns)

    def place(self, step: Array) -> tuple[Array, Array]:
        """First row and column of a wanted tile: stripes of rows, to and fro over the columns."""
        shape = (self.wanted, self.columns)
        number = step * self.blocks + self.me
        return self._place(*plgpu.planar_snake(number, shape, 0, self.tuning.stripe))

    def other_place(self, step: Array) -> tuple[Array, Array]:
        number, columns = step * self.blocks + self.me, jnp.int32(self.columns)
        return self._place(self.wanted + lax.div(number, columns), lax.rem(number, columns))

    def _place(self, row: Array, column: Array) -> tuple[Array, Array]:
        row = 2 * row + lax.axis_index(PAIR) if self.tuning.pair else row
        return row * self.tuning.rows, column * self.width
