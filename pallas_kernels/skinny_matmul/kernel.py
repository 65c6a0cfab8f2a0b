"""Weights streamed once: every program owns some outputs and walks over the whole inner dimension.

One row, and two of small matrices, are multiplied elementwise; large matrices, and more rows, go
through the tensor cores with the weights as the left operand, rows padded to a power of two.
No program shares an output, so sums have one order and no row depends on another.

What bounds both is bytes in flight: about 32 KB a multiprocessor at all times. The elementwise
kernel gets there by holding little else (sums of eight neighbours at once, so that accumulators
take an eighth of the registers), the other by a deep pipeline of loads. An RMS norm is a factor of
a row's products: a program finds it again from the rows it reads. Past eight rows, or where two
matrices are combined, that costs more than the launch of a norm before. Products of the same rows
share a launch, each with programs of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import Dot, dividing_block, iota, multiply_add, triton_call
from .reference import Norm, Product, rms_norm
from .tuning import MAX_VECTOR_ROWS, SkinnyTuning
from .window import Convolution

MAX_ROWS = 32
LANES = 8  # of bfloat16 in one load of a thread


def supported(x: Array, products: Sequence[Product]) -> bool:
    rows, inner = x.shape
    few = rows <= MAX_ROWS and inner % 16 == 0 and x.dtype == jnp.bfloat16
    return few and all(
        p.weights.shape[1] % 16 == 0 and p.weights.dtype == jnp.bfloat16 for p in products
    )


def convolves(x: Array, products: Sequence[Product], norm: Norm | None) -> bool:
    """Whether the products' launch does what their windows ask for, if any do. Elementwise programs
    do not: there are thousands, a few microseconds long, and each would wait for its window."""
    windowed = [p for p in products if p.window is not None]
    if not windowed:
        return True
    return _in_matrices(_tuning(x, products, norm), x) and all(map(_joins, windowed))


def _in_matrices(tuning: SkinnyTuning, x: Array) -> bool:
    """Whether the products are on the tensor cores."""
    return tuning.matrix or x.shape[0] > MAX_VECTOR_ROWS


def _joins(product: Product) -> bool:
    """Whether blocks of outputs are convolved as a whole or not at all."""
    heads, window = _heads(product), product.window
    assert heads is not None and window is not None
    taps = window.weights.shape[2]
    even = all(n % 16 == 0 for n in heads) and taps & (taps - 1) == 0
    return even and product.weights.shape[0] == 1


@dataclass(frozen=True)
class Share:
    """Of one product in a launch: programs first:first + count, `outputs` each of every matrix."""

    first: int
    count: int
    outputs: int
    groups: int
    combine: Callable[..., Array] | None
    heads: tuple[int, int] | None = None  # with a window: channels of one, and those convolved

    def slice(self, program: Any) -> Any:
        return pl.ds(program * self.outputs, self.outputs)

    def lines(self, program: Any) -> list[Any]:
        """Rows of the matrices that a program multiplies."""
        whole = self.count * self.outputs
        starts = (g * whole + program * self.outputs for g in range(self.groups))
        return [pl.ds(start, self.outputs) for start in starts]

    def convolution(
        self, refs: Any, program: Array, rows: Array, valid: Array, interpret: bool
    ) -> Convolution:
        assert self.heads is not None
        first = program * self.outputs
        return Convolution(refs, self.heads, first, self.outputs, rows, valid, interpret)

    def results(self, sums: Sequence[Array]) -> Sequence[Array]:
        return sums if self.combine is None else (self.combine(*sums),)


def _vector_kernel(
    window_refs: Any, x_ref: Any, norm_ref: Any, weight_refs: Any, residual_refs: Any,
    *out_refs: Any, shares: tuple[Share, ...], tuning: SkinnyTuning, eps: float,
) -> None:  # fmt: skip
    rows, inner = x_ref.shape
    lanes = min(LANES, tuning.inner)
    short, steps = tuning.inner // lanes, inner // tuning.inner // tuning.unroll

    def neighbours(x: Array) -> Array:
        return jnp.sum(x.reshape(*x.shape[:-1], short, lanes), axis=-1)

    def product(
        share: Share, program: Array, w_ref: Any, residual_ref: Any, window: Any, o_refs: Any
    ) -> None:
        assert window is None  # see `convolves`
        lines = share.lines(program)

        def parts(step: Any) -> list[Any]:
            first = step * tuning.unroll
            return [pl.ds((first + n) * tuning.inner, tuning.inner) for n in range(tuning.unroll)]

        def body(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            tiles = [[w_ref[line, part] for line in lines] for part in parts(step)]
            for part, w in zip(parts(step), tiles, strict=True):
                x = [x_ref[row, part].astype(jnp.float32) for row in range(rows)]
                squares = [] if norm_ref is None else [neighbours(y * y) for y in x]
                x = x if norm_ref is None else [y * norm_ref[part] for y in x]
                terms = [neighbours(y.astype(jnp.float32) * z[None, :]) for y in w for z in x]
                sums = tuple(s + t for s, t in zip(sums, terms + squares, strict=True))
            return sums

        zero = jnp.zeros((share.outputs, short), jnp.float32)
        line = jnp.zeros((short,), jnp.float32)
        sums = (zero,) * (share.groups * rows) + (line,) * (0 if norm_ref is None else rows)
        sums = lax.fori_loop(0, steps, body, sums)
        totals = [jnp.sum(s, axis=1) for s in sums[: share.groups * rows]]
        for row in range(rows):
            out = totals[row::rows]
            if norm_ref is not None:
                scale = lax.rsqrt(jnp.sum(sums[share.groups * rows + row]) / inner + eps)
                out = [y * scale for y in out]
            for y, o_ref in zip(share.results(out), o_refs, strict=True):
                if residual_ref is not None:
                    y += residual_ref[row, share.slice(program)].astype(jnp.float32)
                o_ref[row, share.slice(program)] = y.astype(o_ref.dtype)

    _each(product, shares, weight_refs, residual_refs, window_refs, out_refs)


def _matrix_kernel(
    window_refs: Any, x_ref: Any, norm_ref: Any, weight_refs: Any, residual_refs: Any,
    *out_refs: Any, shares: tuple[Share, ...], tuning: SkinnyTuning, eps: float, interpret: bool,
) -> None:  # fmt: skip
    rows, inner, dot = *x_ref.shape, Dot("bf16", interpret)
    padded = tuning.columns(rows)
    valid, all_rows = (iota((padded,), 0) < rows)[:, None], pl.ds(0, padded)

    def product(
        share: Share, program: Array, w_ref: Any, residual_ref: Any, window: Any, o_refs: Any
    ) -> None:
        lines = share.lines(program)
        windowed: Convolution | None = None
        if window is not None:
            every = iota((padded,), 0)
            windowed = share.convolution(window, program, every, every < rows, interpret)

        def step(index: Array, carry: tuple[tuple[Array, ...], Any]) -> tuple[Any, Any]:
            sums, squares = carry
            part = pl.ds(index * tuning.inner, tuning.inner)
            x = plt.load(x_ref.at[all_rows, part], mask=valid, other=0.0)
            if norm_ref is not None:
                y = x.astype(jnp.float32)
                squares = multiply_add(y, y, squares, dot.interpret)
                x = (y * norm_ref[part][None, :]).astype(x.dtype)
            products = (dot(w_ref[line, part], x, tb=True) for line in lines)
            return tuple(s + y for s, y in zip(sums, products, strict=True)), squares

        zero = jnp.zeros((share.outputs, padded), jnp.float32)
        squares = None if norm_ref is None else jnp.zeros((padded, tuning.inner), jnp.float32)
        start = (zero,) * share.groups, squares
        sums, squares = lax.fori_loop(0, inner // tuning.inner, step, start)
        if squares is not None:
            scale = lax.rsqrt(jnp.sum(squares, axis=1) / inner + eps)[None, :]
            sums = tuple(y * scale for y in sums)
        where = (all_rows, share.slice(program))
        for y, o_ref in zip(share.results(sums), o_refs, strict=windowed is None):
            y = y.T
            if residual_ref is not None:
                y += plt.load(residual_ref.at[where], mask=valid, other=0.0).astype(jnp.float32)
            y = y.astype(o_ref.dtype)
            plt.store(o_ref.at[where], y, mask=valid)
            if windowed is not None:
                windowed.finish(y, *o_refs[1:])

    _each(product, shares, weight_refs, residual_refs, window_refs, out_refs)


def _each(
    product: Callable[..., None],
    shares: tuple[Share, ...],
    weight_refs: Any,
    residual_refs: Any,
    window_refs: Any,
    out_refs: Any,
) -> None:
    """The product that this program belongs to, and the program's number within it."""
    program, outs = pl.program_id(0), iter(out_refs)
    for share, *given in zip(shares, weight_refs, residual_refs, window_refs, strict=True):
        results = 3 if share.heads else 1 if share.combine else share.groups
        refs = (*given, [next(outs) for _ in range(results)])
        run = functools.partial(product, share, program - share.first, *refs)
        if len(shares) == 1:
            run()
        else:
            pl.when((program >= share.first) & (program < share.first + share.count))(run)


def skinny_matmuls(
    x: Array,
    products: Sequence[Product],
    norm: Norm | None = None,
    *,
    tuning: SkinnyTuning | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    rows, inner = x.shape
    tuning = (tuning or _tuning(x, products, norm)).fit(inner)
    counts = [p.weights.shape[1] for p in products]
    outputs = [_outputs(p, tuning) for p in products]
    programs = [count // size for count, size in zip(counts, outputs, strict=True)]
    first, groups = accumulate(programs, initial=0), [p.weights.shape[0] for p in products]
    combines, heads = [p.combine for p in products], [_heads(p) for p in products]
    shares = tuple(map(Share, first, programs, outputs, groups, combines, heads))
    weights = [p.weights.reshape(-1, inner) for p in products]
    options: dict[str, Any] = {"shares": shares, "tuning": tuning}
    matrix = _in_matrices(tuning, x)
    if norm is not None and matrix and not tuning.narrow:
        x, norm = rms_norm(x, *norm), None
    scale, eps = (None, 0.0) if norm is None else (norm[0].astype(jnp.float32), norm[1])
    if matrix:
        options["interpret"] = interpret
    kernel = functools.partial(_matrix_kernel if matrix else _vector_kernel, **options, eps=eps)
    outs, aliases, windows = list[jax.ShapeDtypeStruct](), dict[int, int](), list[Any]()
    for p in products:
        dtype = p.dtype if p.dtype is not None else x.dtype
        outs += [jax.ShapeDtypeStruct((rows, p.weights.shape[1]), dtype)] * p.results
        if p.window is None:
            windows.append(None)
            continue
        taps, pool, layer, slots = p.window
        taps, at = taps.reshape(-1, taps.shape[-1]), jnp.asarray([layer], jnp.int32)
        aliases[len(jax.tree.leaves(windows))] = len(outs) + 1
        windows.append((pool, at, slots, taps))
        outs.append(jax.ShapeDtypeStruct((rows, taps.shape[0]), dtype))
        outs.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    return triton_call(
        kernel,
        "skinny_matmul",
        (sum(programs),),
        tuple(outs),
        warps=tuning.warps,
        stages=tuning.stages,
        aliases=aliases,
        interpret=interpret,
    )(windows, x, scale, weights, [p.residual for p in products])


def _tuning(x: Array, products: Sequence[Product], norm: Norm | None) -> SkinnyTuning:
    matrices = [(p.weights.shape[0], p.weights.shape[1]) for p in products]
    return SkinnyTuning.default(x.shape[0], x.shape[1], matrices, norm is not None)


def _outputs(product: Product, tuning: SkinnyTuning) -> int:
    """Of a program, which convolves all of its channels or none."""
    size = dividing_block(product.weights.shape[1], tuning.outputs)
    heads = _heads(product)
    return size if heads is None else min(dividing_block(n, size) for n in heads)


def _heads(product: Product) -> tuple[int, int] | None:
    if product.window is None:
        return None
    heads, width, _ = product.window.weights.shape
    return product.weights.shape[1] // heads, width
