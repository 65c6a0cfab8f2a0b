"""From the sums of a tile, columns by rows, to its rows of the result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .reference import Combine
from .units import ALIGNED, LINES


@dataclass(frozen=True)
class GroupedStore:
    """What happens to a tile's sums, for one group of consumers.

    A copy from shared memory has a size known when it is compiled. So rows, a multiple of 8, are
    several of them.
    """

    group: Array
    out: Any  # [consumers, slots, chunk, LINES]
    out_ref: Any
    combine: Combine | None
    matrices: int
    interpret: bool  # layouts and turned references are not

    def tile(self, sums: Array, row: Array, column: Array, rows: Array) -> None:
        """Sums [columns, height], where LINES of each matrix follow each other; of the tile's rows
        so many are of its group."""
        (_, slots, chunk, _), (lines, height) = self.out.shape, sums.shape
        blocks, place = lines // LINES // self.matrices, 0
        for block, start in itertools.product(range(blocks), range(0, height, chunk)):
            size = min(chunk, height - start)
            first = block * self.matrices * LINES
            parts = [
                sums[line : line + LINES, start : start + size]
                for line in range(first, first + self.matrices * LINES, LINES)
            ]
            y = parts[0] if self.combine is None else self.combine(*parts)
            buffer = self.out.at[self.group, place % slots]
            # A tile begins with the first slot, wherever the one before ended: all must be read.
            plgpu.wait_smem_to_gmem(slots - 1 if place else 0, wait_read_only=True)
            self._turn(y.astype(self.out.dtype), buffer.at[pl.ds(0, size)])
            plgpu.commit_smem()
            to = column + (self.group * blocks + block) * LINES
            self._send(buffer, row + start, to, jnp.clip(rows - start, 0, size))
            plgpu.commit_smem_to_gmem_group()
            place += 1

    def _turn(self, y: Array, rows: Any) -> None:
        """Columns by rows into rows of shared memory."""
        if self.interpret:
            rows[...] = y.T
        else:
            turned = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            rows.transpose((1, 0))[...] = turned

    def _send(self, buffer: Any, row: Array, column: Array, rows: Array) -> None:
        first: Any = 0
        for count in (32, 16, ALIGNED):
            if count > buffer.shape[0]:
                continue

            @pl.when(rows & count != 0)
            def _(first: Any = first, count: int = count) -> None:
                lines = pl.ds(pl.multiple_of(row + first, ALIGNED), count)
                to = self.out_ref.at[lines, pl.ds(pl.multiple_of(column, LINES), LINES)]
                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(first, count)], to, commit_group=False)

            if count > ALIGNED:
                first = pl.multiple_of(first + (rows & count), ALIGNED)

    def zeros(self, begin: Array, me: Array, blocks: int) -> None:
        """In the rows from `begin` on, which belong to no group."""
        (consumers, _, chunk, _), (height, width) = self.out.shape, self.out_ref.shape
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer = self.out.at[self.group, 0]
        self._turn(jnp.zeros((LINES, chunk), self.out.dtype), buffer)
        plgpu.commit_smem()
        groups = consumers * blocks
        tiles, first = lax.div(height - begin + (chunk - 1), jnp.int32(chunk)), consumers * me

        def tile(step: Array, _: None) -> None:
            row = begin + (first + self.group + step * groups) * chunk
            rows = lax.min(height - row, jnp.int32(chunk))

            def columns(number: Array, _: None) -> None:
                self._send(buffer, row, number * LINES, rows)

            lax.fori_loop(0, width // LINES, columns, None)

        count = lax.div(tiles - first - self.group + (groups - 1), jnp.int32(groups))
        lax.fori_loop(0, count, tile, None)
