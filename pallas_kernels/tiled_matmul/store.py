"""From the sums of a tile to its results in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .reference import Combine
from .tuning import TiledTuning
from .walk import Walk


@dataclass(frozen=True)
class Store:
    """What happens to a tile's sums, for one group of consumers."""

    group: Array
    out: Any  # [consumers, slots, rows, piece]
    out_ref: Any
    combine: Combine | None
    tuning: TiledTuning
    groups: int

    @property
    def pieces(self) -> int:
        return self.tuning.pieces(self.groups)

    def piece(self, held: Array, piece: int, row: Array, column: Array, valid: Any = None) -> None:
        """Piece of the tile at (row, column), whose rounded sums are `held`."""
        size, slot = self.tuning.piece, piece % self.out.shape[1]
        first = pl.multiple_of(row, self.tuning.share) + self.group * self.tuning.share
        start = pl.multiple_of(column, size) + piece * size
        where = pl.ds(first, self.tuning.share), pl.ds(start, size)
        width = held.shape[1] // self.groups
        starts = [g * width + piece * size for g in range(self.groups)]
        parts = [held[:, a : a + size] for a in starts]
        buffer = self.out.at[self.group, slot]
        y = parts[0]
        if self.combine is not None:
            y = self.combine(*(part.astype(jnp.float32) for part in parts)).astype(y.dtype)
        plgpu.wait_smem_to_gmem(self.out.shape[1] - 1, wait_read_only=True)
        buffer[...] = y
        plgpu.commit_smem()

        def send() -> None:
            plgpu.copy_smem_to_gmem(buffer, self.out_ref.at[where])

        send() if valid is None else pl.when(valid)(send)

    def zeros(self, walk: Walk) -> None:
        """In the tiles that nobody wants."""
        share, size = self.tuning.share, self.tuning.piece
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer = self.out.at[self.group, 0]
        buffer[...] = jnp.zeros((share, size), buffer.dtype)
        plgpu.commit_smem()

        def tile(step: Array, _: None) -> None:
            row, column = walk.other_place(step)
            lines = pl.ds(row + self.group * share, share)
            for piece in range(self.pieces):
                part = pl.ds(pl.multiple_of(column, size) + piece * size, size)
                plgpu.copy_smem_to_gmem(buffer, self.out_ref.at[lines, part])

        lax.fori_loop(0, walk.other_steps, tile, None)
