"""Weights streamed once: every program owns some outputs and walks over the whole inner dimension.

Up to four rows are multiplied elementwise (a tensor-core product would be mostly padding); more go
through the tensor cores with the weights as the left operand, rows padded to 16, 32 or 64.
No program shares an output, so sums have one order and no row depends on another. The norm of a
row is a factor of its products: every program finds it again beside them, from the rows it reads.
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
from .reference import Norm

MAX_ROWS = 64
MAX_VECTOR_ROWS = 4


@dataclass(frozen=True)
class SkinnyTuning:
    outputs: int  # of a program
    inner: int  # of a step
    warps: int
    stages: int = 3

    @classmethod
    def default(cls, rows: int) -> SkinnyTuning:
        if rows <= MAX_VECTOR_ROWS:
            return cls(outputs=4, inner=1024, warps=4)
        return cls(outputs=16, inner=256, warps=4, stages=4)


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
    normed = eps is not None

    def step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        part = pl.ds(index * tuning.inner, tuning.inner)
        x = [x_ref[row, part].astype(jnp.float32) for row in range(rows)]
        squares = [y * y for y in x] if normed else []
        x = [y * norm_refs[0][part] for y in x] if normed else x
        w = [
            plt.load(w_ref.at[_outputs(g * count + first, tuning), part]).astype(jnp.float32)
            for g in range(groups)
        ]
        products = [y * z[None, :] for y in w for z in x]
        return tuple(s + p for s, p in zip(sums, products + squares, strict=True))

    zero = jnp.zeros((tuning.outputs, tuning.inner), jnp.float32)
    line = jnp.zeros((tuning.inner,), jnp.float32)
    carry = (zero,) * (groups * rows) + (line,) * (rows if normed else 0)
    sums = lax.fori_loop(0, inner // tuning.inner, step, carry)
    totals = [jnp.sum(s, axis=1) for s in sums[: groups * rows]]
    for row in range(rows):
        out = totals[row::rows]
        if eps is not None:
            scale = lax.rsqrt(jnp.sum(sums[groups * rows + row]) / inner + eps)
            out = [y * scale for y in out]
        o_ref[row, _outputs(first, tuning)] = combine(*out).astype(o_ref.dtype)


def _matrix_kernel(
    x_ref: Any,
    w_ref: Any,
    *refs: Any,
    tuning: SkinnyTuning,
    combine: Any,
    eps: float | None,
    padded: int,
    dot: Dot,
) -> None:
    *norm_refs, o_ref = refs
    (rows, count), inner = o_ref.shape, w_ref.shape[1]
    groups, first = w_ref.shape[0] // count, pl.program_id(0) * tuning.outputs
    valid = (iota((padded,), 0) < rows)[:, None]
    normed = eps is not None

    def step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        part = pl.ds(index * tuning.inner, tuning.inner)
        x = plt.load(x_ref.at[pl.ds(0, padded), part], mask=valid, other=0.0)
        squares = ()
        if normed:
            wide = x.astype(jnp.float32)
            squares = (sums[-1] + jnp.sum(wide * wide, axis=1),)
            x = (wide * norm_refs[0][part][None, :]).astype(x.dtype)
        w = (w_ref[_outputs(g * count + first, tuning), part] for g in range(groups))
        return (*(s + dot(y, x, tb=True) for s, y in zip(sums, w, strict=False)), *squares)

    zero = jnp.zeros((tuning.outputs, padded), jnp.float32)
    line = jnp.zeros((padded,), jnp.float32)
    carry = (zero,) * groups + (line,) * normed
    sums = lax.fori_loop(0, inner // tuning.inner, step, carry)
    out = list(sums[:groups])
    if eps is not None:
        out = [y * lax.rsqrt(sums[-1] / inner + eps)[None, :] for y in out]
    target = o_ref.at[pl.ds(0, padded), _outputs(first, tuning)]
    plt.store(target, combine(*out).astype(o_ref.dtype).T, mask=valid)


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
    tuning = tuning or SkinnyTuning.default(rows)
    tuning = SkinnyTuning(
        dividing_block(count, tuning.outputs),
        dividing_block(inner, tuning.inner),
        tuning.warps,
        tuning.stages,
    )
    options: dict[str, Any] = {
        "tuning": tuning,
        "combine": combine or (lambda y: y),
        "eps": None if norm is None else norm[1],
    }
    if rows <= MAX_VECTOR_ROWS:
        kernel = functools.partial(_vector_kernel, **options)
    else:
        padded = max(16, 1 << (rows - 1).bit_length())
        kernel = functools.partial(
            _matrix_kernel, **options, padded=padded, dot=Dot("bf16", interpret)
        )
    call = triton_call(
        kernel,
        "skinny_matmul",
        (count // tuning.outputs,),
        (jax.ShapeDtypeStruct((rows, count), dtype if dtype is not None else x.dtype),),
        warps=tuning.warps,
        stages=tuning.stages,
        interpret=interpret,
    )
    norm_weight = () if norm is None else (norm[0].astype(jnp.float32),)
    return call(x, weights.reshape(-1, inner), *norm_weight)[0]
