"""Rows of an array in any order into stages of shared memory, by a group of 128 threads.

The copies of the tensor memory accelerator take neighbouring rows alone on this device. So each
thread copies 16 bytes at a time by itself, to where the tensor cores look for them: a row of 128
bytes keeps its place, and of its eight parts each goes where the swizzle has it. Nobody waits for
these copies but who reads them: they tell a barrier of their own when they are done.

Pallas has no words for such copies and their barriers, so what is here is written as PTX.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..mosaic import SWIZZLE

PART = 16  # bytes that one instruction copies
THREADS = 128
LINE = SWIZZLE  # bytes of a row in a stage
TOGETHER = THREADS * PART // LINE  # rows that the threads copy at once
BARRIER = 8  # bytes
SCALAR = plgpu.Layout.WG_SPLAT


def barriers(stages: int) -> Any:
    """Shared memory for one of each stage."""
    return plgpu.SMEM((stages * BARRIER // 4,), jnp.int32)


def init_barriers(barriers: Any) -> None:
    """By the threads that copy; before others wait, they are told by a barrier of Pallas."""
    stages = barriers.shape[0] * 4 // BARRIER

    @_inline(plgpu.RefType())
    def init(_: Any, barriers: Any) -> None:
        first = _address(barriers, 32)
        chosen = arith.cmpi(arith.CmpIPredicate.eq, _thread(), _number(0))
        for stage in range(stages):
            at = arith.addi(first, _number(stage * BARRIER))
            _do(f"@$1 mbarrier.init.shared::cta.b64 [$0], {THREADS};", "r,b", at, chosen)

    init(barriers)
    plgpu.commit_smem()


def wait_rows(barriers: Any, stage: Array, turn: Array) -> None:
    """Until the rows of a stage, filled for the `turn`th time (from 0), are there, and the tensor
    cores may read them."""

    @_inline(plgpu.RefType(), SCALAR, SCALAR)
    def wait(_: Any, barriers: Any, stage: Any, turn: Any) -> None:
        stage, turn = (value.registers.item() for value in (stage, turn))
        at = arith.addi(_address(barriers, 32), arith.muli(stage, _number(BARRIER)))
        parity = arith.andi(turn, _number(1))
        _do(
            "{ .reg .pred done; "
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }",
            "r,r",
            at,
            parity,
        )
        _do("fence.proxy.async.shared::cta;", "")

    wait(barriers, stage, turn)


def copy_rows(
    x_ref: Any, rows_ref: Any, stages: Any, barriers: Any,
    stage: Array, first: Array, height: Array, column: Array,
) -> None:  # fmt: skip
    """x[rows[first + i], column : column + 64] to row i of a stage [tallest, 64], for i < height;
    its barrier knows when it is done. Nothing behind the end of `rows` is read."""
    (_, tallest, _), width, count = stages.shape, x_ref.shape[1], rows_ref.shape[0]
    swizzled = plgpu.TilingTransform((8, LINE // 2)), plgpu.SwizzleTransform(LINE)
    refs = plgpu.RefType(), plgpu.RefType(), plgpu.RefType(swizzled), plgpu.RefType()

    @_inline(*refs, *(SCALAR,) * 4)
    def copy(
        _: Any, x: Any, rows: Any, stages: Any, barriers: Any,
        stage: Any, first: Any, height: Any, column: Any,
    ) -> None:  # fmt: skip
        given = (value.registers.item() for value in (stage, first, height, column))
        stage, first, height, column = given
        from_x, from_rows = _address(x, 64), _address(rows, 64)
        thread = _thread()
        line, part = arith.divui(thread, _number(8)), arith.remui(thread, _number(8))
        place = arith.xori(part, arith.remui(line, _number(8)))
        to = arith.addi(_address(stages, 32), arith.muli(stage, _number(tallest * LINE)))
        to = arith.addi(to, arith.muli(line, _number(LINE)))
        to = arith.addi(to, arith.muli(place, _number(PART)))
        offset = arith.addi(arith.muli(column, _number(2)), arith.muli(part, _number(PART)))
        from_x = arith.addi(from_x, _wide(offset))
        copies = []
        for start in range(0, tallest, TOGETHER):
            mine = arith.addi(line, _number(start))
            wanted = arith.cmpi(arith.CmpIPredicate.slt, mine, height)
            at = arith.minsi(arith.addi(first, mine), _number(count - 1))
            at = arith.addi(from_rows, arith.muli(_wide(at), _number(4, 64)))
            row = _assembly(_integer(32), "ld.global.nc.b32 $0, [$1];", "=r,l", at)
            source = arith.addi(from_x, arith.muli(_wide(row), _number(2 * width, 64)))
            copies.append((arith.addi(to, _number(start * LINE)), source, wanted))
        for target, source, wanted in copies:  # behind all loads of rows
            code = f"@$2 cp.async.cg.shared.global [$0], [$1], {PART};"
            _do(code, "r,l,b", target, source, wanted)
        at = arith.addi(_address(barriers, 32), arith.muli(stage, _number(BARRIER)))
        _do("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", at)

    copy(x_ref, rows_ref, stages, barriers, stage, first, height, column)


def _inline(*types: Any) -> Any:
    """A function of such arguments, written in MLIR for every thread."""
    return plgpu.inline_mgpu(arg_types=types)


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def _number(value: int, bits: int = 32) -> Any:
    kind = _integer(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _wide(value: Any) -> Any:
    return arith.extui(_integer(64), value)


def _address(ref: Any, bits: int) -> Any:
    return llvm.ptrtoint(_integer(bits), memref_ptr(ref))


def _assembly(kind: Any, code: str, constraints: str, *operands: Any) -> Any:
    return llvm.inline_asm(kind, list(operands), code, constraints, has_side_effects=True)


def _do(code: str, constraints: str, *operands: Any) -> None:
    _assembly(ir.Type.parse("!llvm.void"), code, constraints, *operands)


def _thread() -> Any:
    """Number of a thread in its group."""
    number = _assembly(_integer(32), "mov.u32 $0, %tid.x;", "=r")
    return arith.remui(number, _number(THREADS))
