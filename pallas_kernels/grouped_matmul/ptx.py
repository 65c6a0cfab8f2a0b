"""What is written as PTX, as Pallas has no words for it: functions of a group of 128 threads."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

THREADS = 128
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


def sum_of(*terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def times(value: Any, factor: int, bits: int = 32) -> Any:
    return arith.muli(value, number(factor, bits))
