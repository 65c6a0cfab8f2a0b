"""Tiles of a launch: what one block of threads computes, and in which order.

Two groups of consumers hold a tile's float32 sums in their registers, 64 rows of 256 columns each:
the widest product of the tensor cores, which reads least of shared memory for its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ..device import MULTIPROCESSORS

CONSUMERS = 2  # groups of 128 threads


@dataclass(frozen=True)
class TiledTuning:
    rows: int = 128  # of a tile, half of them for each group of consumers
    columns: int = 256  # of a tile: of all matrices together
    inner: int = 64  # of a step: as wide as shared memory is swizzled
    stages: int = 4  # steps whose operands are loaded or on their way
    pair: bool = True  # two blocks with the same columns load half of the weights each
    stripe: int = 8  # (pairs of) tiles of rows that run beside each other: they share weights in L2
    piece: int = 64  # columns of a result that are stored at once
    blocks: int = MULTIPROCESSORS

    @classmethod
    def default(cls, x: Array, weights: Array, interpret: bool) -> TiledTuning | None:
        """None: the kernel does not cover the case."""
        if interpret:  # which knows no pairs of blocks, and is slow
            form = cls(columns=128, stages=3, pair=False, blocks=2, piece=32)
        else:
            form = cls(piece=64 // weights.shape[0])
        return form if form.fits(x, weights) else None

    def fits(self, x: Array, weights: Array) -> bool:
        (rows, inner), (groups, width, _) = x.shape, weights.shape
        halves = x.dtype == weights.dtype == jnp.bfloat16
        steps = max(self.stages, self.pieces(groups) + 1)
        whole = rows % self.rows == 0 and width % (self.columns // groups) == 0
        long = inner % self.inner == 0 and inner >= steps * self.inner
        return halves and groups <= 2 and whole and long

    def fills(self, x: Array, weights: Array) -> bool:
        """Whether blocks have work for nine tenths of the time: they take a tile at a time."""
        groups, width, _ = weights.shape
        tiles = x.shape[0] // self.rows * (width * groups // self.columns)
        return tiles >= 0.9 * self.blocks * -(-tiles // self.blocks)

    def pieces(self, groups: int) -> int:
        """Of a tile's results."""
        return self.columns // groups // self.piece

    @property
    def share(self) -> int:
        """Rows of a group of consumers."""
        return self.rows // CONSUMERS

    @property
    def walkers(self) -> int:
        """Blocks, or pairs of them, that walk over tiles."""
        return self.blocks // (2 if self.pair else 1)

    @property
    def together(self) -> int:
        """Rows of the tiles that share weights."""
        return self.rows * (2 if self.pair else 1)

    def slots(self, groups: int) -> int:
        """Pieces a group of consumers that wait in shared memory to be stored."""
        return min(self.pieces(groups), 16 * 1024 // (2 * self.share * self.piece))
