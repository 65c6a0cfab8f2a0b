"""From the sums of a tile, columns by rows, to its rows of the result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .reference import Combine
from .turned import TOGETHER, write_turned, write_zeros
from .units import ALIGNED, LINES


@dataclass(frozen=True)
class GroupedStore:
    """What happens to a tile's sums, for one group of consumers."""

    group: Array
    out: Any  # [consumers * slots, chunk, LINES]: where results are turned
    slots: int
    out_ref: Any
    combine: Combine | None
    matrices: int
    interpret: bool  # PTX is not

    def tile(self, sums: Array, row: Array, column: Array, rows: Array) -> None:
        """Sums [columns, height], where LINES of each matrix follow each other; of the tile's rows
        so many are of its group."""
        chunk, (lines, height) = self.out.shape[1], sums.shape
        blocks, place = lines // LINES // self.matrices, 0
        for block, start in itertools.product(range(blocks), range(0, height, chunk)):
            size = min(chunk, height - start)
            first = block * self.matrices * LINES
            parts = [
                sums[line : line + LINES, start : start + size]
                for line in range(first, first + self.matrices * LINES, LINES)
            ]
            y = parts[0] if self.combine is None else self.combine(*parts)
            to = column + (self.group * blocks + block) * LINES
            self._write(y, place, row + start, to, rows - start)
            place += 1

    def _write(self, y: Array, place: Any, row: Array, column: Array, rows: Array) -> None:
        """One of the chunks of a tile."""
        y = y.astype(self.out_ref.dtype)
        if self.interpret:
            self._copy(y, row, column, rows)
        else:
            # A tile begins with the first slot, wherever the one before ended. From then on
            # the threads meet once between two uses of a slot.
            slot = self.group * self.slots + place % self.slots
            behind = place == 0 or self.slots == 1
            write_turned(y, self.out, self.out_ref, slot, row, column, rows, behind=behind)

    def _copy(self, y: Array, row: Array, column: Array, rows: Array) -> None:
        for start in range(0, y.shape[1], ALIGNED):

            @pl.when(start < rows)
            def _(start: int = start) -> None:
                lines, columns = pl.ds(row + start, ALIGNED), pl.ds(column, LINES)
                self.out_ref[lines, columns] = y[:, start : start + ALIGNED].T

    def zeros(self, begin: Array, me: Array, blocks: int) -> None:
        """In the rows from `begin` on, which belong to no group."""
        height, width = self.out_ref.shape
        consumers = self.out.shape[0] // self.slots
        first, step = (consumers * me + self.group) * TOGETHER, consumers * blocks * TOGETHER

        def some(number: Array, _: None) -> None:
            row = begin + first + number * step

            def columns(number: Array, _: None) -> None:
                column = number * LINES
                if self.interpret:
                    y = jnp.zeros((LINES, TOGETHER), self.out_ref.dtype)
                    self._copy(y, row, column, height - row)
                else:
                    write_zeros(self.out_ref, row, column, height - row)

            lax.fori_loop(0, width // LINES, columns, None)

        count = lax.div(height - begin - first + (step - 1), jnp.int32(step))
        lax.fori_loop(0, count, some, None)
