"""One pass: every program normalises and gates one head of some tokens, read where they lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ..triton import iota, power_of_two_blocks, triton_call

MOST_ROWS = 16  # tokens of a program: 8 values of 128 a thread of four warps


def supported(o: Array, gate: Array) -> bool:
    """Packed tokens of bfloat16 or float32. (Whole sequences side by side are for training, and a
    kernel has no derivative.)"""
    dtypes = (jnp.bfloat16, jnp.float32)
    return o.ndim == 3 and o.shape[0] > 0 and o.dtype in dtypes and gate.dtype in dtypes


def _kernel(
    start_ref: Any, o_ref: Any, weight_ref: Any, gate_ref: Any, out_ref: Any,
    *, rows: int, first: int, eps: float, activation: Callable[[Array], Array],
) -> None:  # fmt: skip
    count, heads, width = out_ref.shape
    group, head = heads // gate_ref.shape[1], pl.program_id(0)
    begin = 0 if start_ref is None else start_ref[0]
    tokens = pl.ds(pl.program_id(1) * rows, rows)
    tokens_of_o = pl.ds(begin + pl.program_id(1) * rows, rows)
    valid = (pl.program_id(1) * rows + iota((rows,), 0) < count)[:, None]
    channel = first + (head % group) * width
    parts = power_of_two_blocks(width, 256)

    def load(ref: Any, some: Any, at: Any, offset: Any, size: int) -> Array:
        part = ref.at[some, at, pl.ds(offset, size)]
        return plt.load(part, mask=valid, other=0.0).astype(jnp.float32)

    # All is asked for before any of it is used.
    o = [load(o_ref, tokens_of_o, head, *part) for part in parts]
    gate = [load(gate_ref, tokens, head // group, channel + at, size) for at, size in parts]
    total = functools.reduce(jnp.add, [jnp.sum(x * x, axis=1) for x in o])
    scale = lax.rsqrt(total / width + eps)[:, None]
    for (at, size), x, z in zip(parts, o, gate, strict=True):
        y = x * scale * weight_ref[pl.ds(at, size)][None, :] * activation(z)
        target = out_ref.at[tokens, head, pl.ds(at, size)]
        plt.store(target, y.astype(out_ref.dtype), mask=valid)


def gated_rms_norm(
    o: Array,
    weight: Array,
    gate: Array,
    first: int,
    eps: float,
    activation: Callable[[Array], Array],
    dtype: DTypeLike,
    start: int | Array | None = None,
    *,
    interpret: bool = False,
) -> Array:
    count, (heads, width) = gate.shape[0], o.shape[1:]
    rows = min(MOST_ROWS, pl.next_power_of_2(count))
    call = triton_call(
        functools.partial(_kernel, rows=rows, first=first, eps=eps, activation=activation),
        "gated_rms_norm",
        (heads, pl.cdiv(count, rows)),
        (jax.ShapeDtypeStruct((count, heads, width), dtype),),
        warps=4 if rows > 2 else 1,
        interpret=interpret,
    )
    begin = None if start is None else jnp.asarray([start], jnp.int32)
    return call(begin, o, weight.astype(jnp.float32), gate)[0]
