"""Rows of an array in any order into stages of shared memory, by a group of 128 threads.

The copies of the tensor memory accelerator take neighbouring rows alone on this device. So each
thread copies 16 bytes at a time by itself, to where the tensor cores look for them: a row of 128
bytes keeps its place, and of its eight parts each goes where the swizzle has it. Nobody waits for
these copies but who reads them: they tell a barrier of their own when they are done.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from .ptx import (
    LINE,
    PART,
    SCALAR,
    THREADS,
    TOGETHER,
    address,
    assembly,
    do,
    inline,
    integer,
    line_and_part,
    number,
    scalars,
    swizzled,
    thread,
    wide,
)

BARRIER = 8  # bytes


def barriers(stages: int) -> Any:
    """Shared memory for one of each stage."""
    return plgpu.SMEM((stages * BARRIER // 4,), jnp.int32)


def init_barriers(barriers: Any) -> None:
    """By the threads that copy; before others wait, they are told by a barrier of Pallas."""
    stages = barriers.shape[0] * 4 // BARRIER

    @inline(plgpu.RefType())
    def init(_: Any, barriers: Any) -> None:
        first = address(barriers, 32)
        chosen = arith.cmpi(arith.CmpIPredicate.eq, thread(), number(0))
        for stage in range(stages):
            at = arith.addi(first, number(stage * BARRIER))
            do(f"@$1 mbarrier.init.shared::cta.b64 [$0], {THREADS};", "r,b", at, chosen)

    init(barriers)
    plgpu.commit_smem()


def wait_rows(barriers: Any, stage: Array, turn: Array) -> None:
    """Until the rows of a stage, filled for the `turn`th time (from 0), are there, and the tensor
    cores may read them."""

    @inline(plgpu.RefType(), SCALAR, SCALAR)
    def wait(_: Any, barriers: Any, stage: Any, turn: Any) -> None:
        stage, turn = scalars(stage, turn)
        at = arith.addi(address(barriers, 32), arith.muli(stage, number(BARRIER)))
        parity = arith.andi(turn, number(1))
        do(
            "{ .reg .pred done; "
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }",
            "r,r",
            at,
            parity,
        )
        do("fence.proxy.async.shared::cta;", "")

    wait(barriers, stage, turn)


def copy_rows(
    x_ref: Any, rows_ref: Any, stages: Any, barriers: Any,
    stage: Array, first: Array, height: Array, column: Array,
) -> None:  # fmt: skip
    """x[rows[first + i], column : column + 64] to row i of a stage [tallest, 64], for i < height;
    its barrier knows when it is done. Nothing behind the end of `rows` is read."""
    (_, tallest, _), width, count = stages.shape, x_ref.shape[1], rows_ref.shape[0]
    transforms = plgpu.TilingTransform((8, LINE // 2)), plgpu.SwizzleTransform(LINE)
    refs = plgpu.RefType(), plgpu.RefType(), plgpu.RefType(transforms), plgpu.RefType()

    @inline(*refs, *(SCALAR,) * 4)
    def copy(
        _: Any, x: Any, rows: Any, stages: Any, barriers: Any,
        stage: Any, first: Any, height: Any, column: Any,
    ) -> None:  # fmt: skip
        stage, first, height, column = scalars(stage, first, height, column)
        from_x, from_rows = address(x, 64), address(rows, 64)
        line, part = line_and_part()
        place = swizzled(line, part)
        to = arith.addi(address(stages, 32), arith.muli(stage, number(tallest * LINE)))
        to = arith.addi(to, arith.muli(line, number(LINE)))
        to = arith.addi(to, arith.muli(place, number(PART)))
        offset = arith.addi(arith.muli(column, number(2)), arith.muli(part, number(PART)))
        from_x = arith.addi(from_x, wide(offset))
        copies = []
        for start in range(0, tallest, TOGETHER):
            mine = arith.addi(line, number(start))
            wanted = arith.cmpi(arith.CmpIPredicate.slt, mine, height)
            at = arith.minsi(arith.addi(first, mine), number(count - 1))
            at = arith.addi(from_rows, arith.muli(wide(at), number(4, 64)))
            row = assembly(integer(32), "ld.global.nc.b32 $0, [$1];", "=r,l", at)
            source = arith.addi(from_x, arith.muli(wide(row), number(2 * width, 64)))
            copies.append((arith.addi(to, number(start * LINE)), source, wanted))
        for target, source, wanted in copies:  # behind all loads of rows
            code = f"@$2 cp.async.cg.shared.global [$0], [$1], {PART};"
            do(code, "r,l,b", target, source, wanted)
        at = arith.addi(address(barriers, 32), arith.muli(stage, number(BARRIER)))
        do("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", at)

    copy(x_ref, rows_ref, stages, barriers, stage, first, height, column)
