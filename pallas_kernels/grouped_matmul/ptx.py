"""What is written as PTX, as Pallas has no words for it: functions of a group of 128 threads."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..mosaic import SWIZZLE

THREADS = 128
LINE = SWIZZLE  # bytes of a row in shared memory
PART = 16  # bytes of it that a thread moves by one instruction
TOGETHER = THREADS * PART // LINE  # rows that the threads move at once
SCALAR = plgpu.Layout.WG_SPLAT


def inline(*types: Any) -> Any:
    """A function of such arguments, written in MLIR for every thread."""
    return plgpu.inline_mgpu(arg_types=types)


def scalars(*values: Any) -> tuple[Any, ...]:
    return tuple(value.registers.item() for value in values)


def integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def number(value: int, bits: int = 32) -> Any:
    kind = integer(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def wide(value: Any) -> Any:
    return arith.extui(integer(64), value)


def address(ref: Any, bits: int) -> Any:
    return llvm.ptrtoint(integer(bits), memref_ptr(ref))


def assembly(kind: Any, code: str, constraints: str, *operands: Any) -> Any:
    return llvm.inline_asm(kind, list(operands), code, constraints, has_side_effects=True)


def do(code: str, constraints: str, *operands: Any) -> None:
    assembly(ir.Type.parse("!llvm.void"), code, constraints, *operands)


def thread() -> Any:
    """Number of a thread in its group."""
    index = assembly(integer(32), "mov.u32 $0, %tid.x;", "=r")
    return arith.remui(index, number(THREADS))


def line_and_part() -> tuple[Any, Any]:
    """Which row, of those that are moved at once, and which part of it are a thread's."""
    index = thread()
    return arith.divui(index, number(8)), arith.remui(index, number(8))


def swizzled(line: Any, part: Any) -> Any:
    """Where a part of a row lies, of the eight that the row has."""
    return arith.xori(part, arith.remui(line, number(8)))


def sum_of(*terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def times(value: Any, factor: int, bits: int = 32) -> Any:
    return arith.muli(value, number(factor, bits))
