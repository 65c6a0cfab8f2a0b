"""How the weights of a launch are cut into programs and steps.

Two programs on a multiprocessor that has room for them all end together; one that waits for its
turn streams alone at the end. So the tensor cores' pipelines are as deep as fits with every program
on the chip at once. Measured on an H200 (eval/notes/skinny_matmul.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..device import MULTIPROCESSORS
from ..triton import dividing_block

MAX_VECTOR_ROWS = 2  # with three, the tensor cores take a fifth less
FEW_ROWS = 8
LARGE = 128 * 2**20  # bytes of weights from which on the tensor cores win for two rows
MANY_WARPS = 16 * MULTIPROCESSORS  # fewer programs of one warp have too little on their way
SHARED = 227 * 1024  # bytes of a multiprocessor's
RESERVED = 2048  # of each program's: the system's and the barriers'
MOST_STAGES = 16  # more were never faster


@dataclass(frozen=True)
class SkinnyTuning:
    outputs: int  # of a program
    inner: int  # of a step
    warps: int
    unroll: int = 1  # steps whose weights are asked for together (elementwise kernel)
    stages: int = 1  # of the loads' pipeline (tensor cores)
    matrix: bool = False  # on the tensor cores, which more than MAX_VECTOR_ROWS need
    narrow: bool = False  # x is 8 columns wide and normalised in every program (tensor cores)

    @classmethod
    def default(
        cls, rows: int, inner: int, matrices: Sequence[tuple[int, int]], normed: bool
    ) -> SkinnyTuning:
        """For `matrices` (groups, outputs) of each product of the launch: the largest decides."""
        sizes = [groups * count for groups, count in matrices]
        size, together = 2 * inner * sum(sizes), matrices[sizes.index(max(sizes))][0]
        if rows == 1 or (rows <= MAX_VECTOR_ROWS and size < LARGE):
            few = _programs(matrices, 2) < MANY_WARPS
            return cls._elementwise(rows, inner, together > 1, few, size >= LARGE)
        if rows <= FEW_ROWS and together == 1:
            outputs = 64 if _programs(matrices, 64) >= MULTIPROCESSORS else 32
            form = cls(outputs, 128, 2, matrix=True, narrow=True)
        else:
            # 16 KB of weights a step. Wide programs read x less often. From 64 outputs and 16
            # columns on, products take weights and x from where they arrive: a norm inside would
            # put x into registers first.
            outputs = 64 if 2 * _programs(matrices, 64) >= MULTIPROCESSORS else 32
            form = cls(outputs, 8192 // (outputs * together), outputs // 16, matrix=True)
        return replace(form, stages=form._stages(rows, matrices, normed))

    @classmethod
    def _elementwise(
        cls, rows: int, inner: int, combined: bool, few: bool, large: bool
    ) -> SkinnyTuning:
        """Of `few` programs, were they of one warp; for one or two rows."""
        if rows > 1 and inner > 8192:
            return cls(outputs=4, inner=1024, warps=4)
        if inner % 1024 == 0 and few:
            return cls(outputs=2, inner=1024, warps=4, unroll=5)
        line = inner <= 5 * 512  # all of one is asked for at once
        warps = 2 if rows == 1 and line and combined else 1
        unroll = 2 if large and not line and not combined else 5
        return cls(outputs=2, inner=512, warps=warps, unroll=unroll)

    def _stages(self, rows: int, matrices: Sequence[tuple[int, int]], normed: bool) -> int:
        """As many as fit with every program on the chip, or else with two on a multiprocessor.
        A narrow program of 32 outputs takes a quarter of it at most: twice that is slower."""
        lines = max(groups * dividing_block(count, self.outputs) for groups, count in matrices)
        step = 2 * self.inner * (lines + self.columns(rows))
        step += 4 * self.inner if normed and self.narrow else 0
        # Where the tensor cores read weights through registers, a stage's are there already.
        held = 0 if self.warps == 4 else 1
        together = -(-_programs(matrices, self.outputs) // MULTIPROCESSORS)
        together = max(together, 128 // self.outputs) if self.narrow else together
        buffers = (SHARED // together - RESERVED) // step
        buffers = buffers if buffers >= 2 else (SHARED // 2 - RESERVED) // step
        return min(MOST_STAGES, buffers + held)

    def columns(self, rows: int) -> int:
        """Of x on the tensor cores, whose fewest are 8."""
        return max(8 if self.narrow else 16, 1 << (rows - 1).bit_length())

    def fit(self, inner: int) -> SkinnyTuning:
        """The nearest tuning that divides the inner dimension."""
        width = dividing_block(inner, self.inner)
        steps = inner // width
        unroll = max(n for n in range(1, self.unroll + 1) if steps % n == 0)
        return replace(self, inner=width, unroll=unroll)


def _programs(matrices: Sequence[tuple[int, int]], outputs: int) -> int:
    return sum(count // dividing_block(count, outputs) for _, count in matrices)
