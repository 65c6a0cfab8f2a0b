"""Results, columns by rows as the tensor cores leave them, to rows of an array.

A group of 128 threads turns them in shared memory, 64 columns at a time, and each thread writes 16
bytes of a row at a time. The copies of the tensor memory accelerator would stand in line behind
all loads that were asked for ahead, and the shared memory could not be used again until then.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu.utils import bitcast, warpgroup_barrier
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from .ptx import (
    LINE,
    PART,
    SCALAR,
    TOGETHER,
    address,
    do,
    inline,
    integer,
    line_and_part,
    number,
    scalars,
    sum_of,
    swizzled,
    thread,
    times,
    wide,
)

SMALL = 8  # rows and columns that are turned by one instruction, of up to four such


def write_turned(
    y: Array, slots: Any, out_ref: Any, slot: Array, row: Array, column: Array, rows: Array,
    *, behind: bool,
) -> None:  # fmt: skip
    """y [64, n] to out[row + i, column : column + 64] for i < rows, by way of shared memory
    slots[slot] [n rounded up to 16, or more, 64]. The threads may still read what they wrote of
    before there: they are waited for if `behind`, else they have met since."""
    height, width, room = y.shape[1], out_ref.shape[1], slots.shape[1]
    refs = plgpu.RefType(), plgpu.RefType()

    @inline(plgpu.Layout.WGMMA, *refs, *(SCALAR,) * 4)
    def write(
        _: Any, y: Any, slots: Any, out: Any, slot: Any, row: Any, column: Any, rows: Any
    ) -> None:
        slot, row, column, rows = scalars(slot, row, column, rows)
        base = sum_of(address(slots, 32), times(slot, room * LINE))
        if behind:
            warpgroup_barrier()
        _turn(y, base)
        warpgroup_barrier()
        line, part = line_and_part()
        source = sum_of(base, times(line, LINE), times(swizzled(line, part), PART))
        target = _place(out, sum_of(row, line), column, part, width)
        _write(source, target, arith.subi(rows, line), height, 2 * width)

    write(y, slots, out_ref, *(jnp.int32(value) for value in (slot, row, column, rows)))


def write_zeros(out_ref: Any, row: Array, column: Array, rows: Array) -> None:
    """To out[row + i, column : column + 64] for i < rows, of which 16 at most are written."""
    width = out_ref.shape[1]

    @inline(plgpu.RefType(), *(SCALAR,) * 3)
    def write(_: Any, out: Any, row: Any, column: Any, rows: Any) -> None:
        row, column, rows = scalars(row, column, rows)
        line, part = line_and_part()
        code = "{ .reg .pred p; setp.gt.s32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $2, $2, $2}; }"
        at = _place(out, sum_of(row, line), column, part, width)
        do(code, "l,r,r", at, arith.subi(rows, line), number(0))

    write(out_ref, row, column, rows)


def _place(out: Any, row: Any, column: Any, part: Any, width: int) -> Any:
    """Address of a part of 64 columns of an array."""
    first = sum_of(times(wide(row), 2 * width, 64), times(wide(column), 2, 64))
    return sum_of(address(out, 64), first, times(wide(part), PART, 64))


def _turn(y: Any, base: Any) -> None:
    """Into rows of shared memory, of whose parts each goes where a swizzle has it: so neither
    this nor reading them makes two threads wait for one bank."""
    values = [bitcast(value, integer(32)) for value in y.registers.flat]  # of 8 rows: 2 x 8 columns
    index = thread()
    warp, lane = arith.divui(index, number(32)), arith.remui(index, number(32))
    which, line = arith.divui(lane, number(8)), arith.remui(lane, number(8))
    half, more = arith.remui(which, number(2)), arith.divui(which, number(2))
    part = arith.xori(sum_of(times(warp, 2), half), line)
    at = sum_of(base, times(sum_of(times(more, SMALL), line), LINE), times(part, PART))
    for first in range(0, len(values), 4):
        some = values[first : first + 4]
        names = ", ".join(f"${n + 1}" for n in range(len(some)))
        start = first // 2 * SMALL * LINE
        do(
            f"stmatrix.sync.aligned.m8n8.x{len(some)}.trans.shared.b16 "
            f"[$0 + {start}], {{{names}}};",
            ",".join("r" * (1 + len(some))),
            at,
            *some,
        )


def _write(source: Any, target: Any, left: Any, height: int, stride: int) -> None:
    """Every 16th row of shared memory from `source` on, of which `left` count, to `target`. All
    are read: what only some threads load would have a register for all of the kernel."""
    starts = range(0, height, TOGETHER)
    loads, stores = [], []
    for n, start in enumerate(starts):
        names = ", ".join(f"v{4 * n + word}" for word in range(4))
        loads.append(f"setp.gt.s32 p{n}, $2, {start};")
        loads.append(f"ld.shared.v4.b32 {{{names}}}, [$0 + {start * LINE}];")
        stores.append(f"@p{n} st.global.v4.b32 [$1 + {start * stride}], {{{names}}};")
    registers = f".reg .b32 v<{4 * len(starts)}>; .reg .pred p<{len(starts)}>;"
    do(" ".join(["{", registers, *loads, *stores, "}"]), "r,l,r", source, target, left)
