"""Weights streamed once: every program owns some outputs and walks over the whole inner dimension.

Up to four rows are multiplied elementwise (a tensor-core product would be mostly padding); more go
through the tensor cores with the weights as the left operand, rows padded to 16 or 32.
No program shares an output, so sums have one order and no row depends on another.

What bounds both is bytes in flight: about 26 KB a multiprocessor at all times. The elementwise
kernel gets there by holding little else (sums of eight neighbours at once, so that accumulators
take an eighth of the registers) and asking for several steps' weights before it uses them. It also
applies an RMS norm, which is a factor of a row's products: every program finds it again from the
rows it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ..triton import Dot, dividing_block, iota, triton_call
from .reference import Norm, rms_norm

MAX_ROWS = 32
MAX_VECTOR_ROWS = 4
LANES = 8  # of bfloat16 in one load of a thread


@dataclass(frozen=True)
class SkinnyTuning:
    outputs: int  # of a program
    inner: int  # of a step
    warps: int
    unroll: int = 1  # steps whose weights are asked for together (elementwise kernel)
    stages: int = 1  # of the loads' pipeline (tensor cores)

    @classmethod
    def default(cls, rows: int, inner: int) -> SkinnyTuning:
        """Measured on an H200 (eval/notes/skinny_matmul.md)."""
        if rows <= MAX_VECTOR_ROWS and inner > 4096:
            return cls(outputs=4, inner=1024, warps=4)
        if rows <= MAX_VECTOR_ROWS:
            return cls(outputs=2, inner=512, warps=1, unroll=5)
        if inner > 4096:
            return cls(outputs=32, inner=256, warps=2, stages=4)
        return cls(outputs=32, inner=128, warps=2, stages=3)

    def fit(self, count: int, inner: int) -> SkinnyTuning:
        """The nearest tuning that divides the dimensions."""
        width = dividing_block(inner, self.inner)
        steps = inner // width
        unroll = max(n for n in range(1, self.unroll + 1) if steps % n == 0)
        outputs = dividing_block(count, self.outputs)
        return SkinnyTuning(outputs, width, self.warps, unroll, self.stages)


def supported(x: Array, weights: Array) -> bool:
    rows, inner = x.shape
    fits = rows <= MAX_ROWS and inner % 16 == 0 and weights.shape[1] % 16 == 0
    return fits and x.dtype == weights.dtype == jnp.bfloat16


def _outputs(first: Any, tuning: SkinnyTuning) -> Any:
    return pl.ds(first, tuning.outputs)


def _vector_kernel(
    x_ref: Any, w_ref: Any, *refs: Any, tuning: SkinnyTuning, combine: Any, eps: float | None
) -> None:
    *norm_refs, o_ref = refs
    (rows, count), inner = o_ref.shape, w_ref.shape[1]
    groups, first = w_ref.shape[0] // count, pl.program_id(0) * tuning.outputs
    lanes = min(LANES, tuning.inner)
    short = tuning.inner // lanes

    def neighbours(x: Array) -> Array:
        return jnp.sum(x.reshape(*x.shape[:-1], short, lanes), axis=-1)

    def step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        for part_index in range(tuning.unroll):
            part = pl.ds((index * tuning.unroll + part_index) * tuning.inner, tuning.inner)
            x = [x_ref[row, part].astype(jnp.float32) for row in range(rows)]
            squares = [] if eps is None else [neighbours(y * y) for y in x]
            x = x if eps is None else [y * norm_refs[0][part] for y in x]
            w = [w_ref[_outputs(g * count + first, tuning), part] for g in range(groups)]
            products = [neighbours(y.astype(jnp.float32) * z[None, :]) for y in w for z in x]
            sums = tuple(s + p for s, p in zip(sums, products + squares, strict=True))
        return sums

    zero = jnp.zeros((tuning.outputs, short), jnp.float32)
    line = jnp.zeros((short,), jnp.float32)
    carry = (zero,) * (groups * rows) + (line,) * (0 if eps is None else rows)
    sums = lax.fori_loop(0, inner // tuning.inner // tuning.unroll, step, carry)
    totals = [jnp.sum(s, axis=1) for s in sums[: groups * rows]]
    for row in range(rows):
        out = totals[row::rows]
        if eps is not None:
            scale = lax.rsqrt(jnp.sum(sums[groups * rows + row]) / inner + eps)
            out = [y * scale for y in out]
        o_ref[row, _outputs(first, tuning)] = combine(*out).astype(o_ref.dtype)


def _matrix_kernel(
    x_ref: Any, w_ref: Any, o_ref: Any, *, tuning: SkinnyTuning, combine: Any, padded: int, dot: Dot
) -> None:
    (rows, count), inner = o_ref.shape, w_ref.shape[1]
    groups, first = w_ref.shape[0] // count, pl.program_id(0) * tuning.outputs
    valid = (iota((padded,), 0) < rows)[:, None]

    def step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        part = pl.ds(index * tuning.inner, tuning.inner)
        x = plt.load(x_ref.at[pl.ds(0, padded), part], mask=valid, other=0.0)
        w = (w_ref[_outputs(g * count + first, tuning), part] for g in range(groups))
        return tuple(s + dot(y, x, tb=True) for s, y in zip(sums, w, strict=True))

    zero = jnp.zeros((tuning.outputs, padded), jnp.float32)
    sums = lax.fori_loop(0, inner // tuning.inner, step, (zero,) * groups)
    target = o_ref.at[pl.ds(0, padded), _outputs(first, tuning)]
    plt.store(target, combine(*sums).astype(o_ref.dtype).T, mask=valid)


def skinny_matmul(
    x: Array,
    weights: Array,
    combine: Callable[..., Array] | None,
    dtype: DTypeLike | None,
    norm: Norm | None = None,
    *,
    tuning: SkinnyTuning | None = None,
    interpret: bool = False,
) -> Array:
    rows, (_, count, inner) = x.shape[0], weights.shape
    tuning = (tuning or SkinnyTuning.default(rows, inner)).fit(count, inner)
    options: dict[str, Any] = {"tuning": tuning, "combine": combine or (lambda y: y)}
    extra: tuple[Array, ...] = ()
    if rows <= MAX_VECTOR_ROWS:
        eps = None if norm is None else norm[1]
        extra = () if norm is None else (norm[0].astype(jnp.float32),)
        kernel = functools.partial(_vector_kernel, **options, eps=eps)
    else:
        x = x if norm is None else rms_norm(x, *norm)
        padded = max(16, 1 << (rows - 1).bit_length())
        dot = Dot("bf16", interpret)
        kernel = functools.partial(_matrix_kernel, **options, padded=padded, dot=dot)
    call = triton_call(
        kernel,
        "skinny_matmul",
        (count // tuning.outputs,),
        (jax.ShapeDtypeStruct((rows, count), dtype if dtype is not None else x.dtype),),
        warps=tuning.warps,
        stages=tuning.stages,
        interpret=interpret,
    )
    return call(x, weights.reshape(-1, inner), *extra)[0]
