"""The grouped product for Hopper, interpreted, against float64; and the list of its units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, preferred_alignment
from pallas_kernels.grouped_matmul import api
from pallas_kernels.grouped_matmul.units import FIELDS, list_units

from ..assertions import assert_close
from .lowering import lower_for_cuda

BOUND, TALLEST = 5e-3, 64

SIZES = {
    "one_group": [136],
    "all_in_the_last": [0, 0, 96],
    "nobody": [0, 0],
    "ends_within_pieces": [8, 0, 72, 104, 64],
    "eight_each": [8] * 9,
}


def silu_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.silu(a) * b


@functools.cache
def compiled(**options: Any) -> Callable[..., Any]:
    options |= dict(implementation="pallas", interpret=True, dtype=jnp.bfloat16, aligned=8)
    return jax.jit(functools.partial(grouped_matmul, **options))


def inputs(sizes: list[int], rows: int, matrices: int, n: int, k: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(len(sizes))
    shape = (len(sizes), *((matrices,) if matrices > 1 else ()), n, k)
    x, w = rng.normal(size=(rows, k)), rng.normal(size=shape) * k**-0.5
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(sizes, jnp.int32)


def expected(x: Any, w: Any, sizes: list[int]) -> np.ndarray:
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y, begin = np.zeros((len(x), w.shape[-2])), 0
    for matrices, size in zip(w.reshape(len(w), -1, *w.shape[-2:]), sizes, strict=True):
        parts = [x[begin : begin + size] @ m.T for m in matrices]
        gated = len(parts) == 2
        y[begin : begin + size] = (
            parts[0] / (1 + np.exp(-parts[0])) * parts[1] if gated else parts[0]
        )
        begin += size
    return y


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_against_float64(name: str, matrices: int) -> None:
    """Rows past the groups are poisoned, and give zeros."""
    sizes, total = SIZES[name], sum(SIZES[name])
    rows = max(TALLEST, total) + 24
    x, w, group_sizes = inputs(sizes, rows, matrices, 128, 192)
    combine = silu_product if matrices == 2 else None
    out = compiled(combine=combine)(x.at[total:].set(jnp.nan), w, group_sizes)
    assert out.shape == (rows, w.shape[-2]) and out.dtype == jnp.bfloat16
    found = np.asarray(out, np.float32)
    np.testing.assert_array_equal(found[total:], 0)
    if total:
        assert_close("wanted", found[:total], expected(x, w, sizes)[:total], BOUND)


def test_gathers_rows() -> None:
    """Each row of x is used more than once, and an unchosen group's matrices by nobody. They are
    taken before the kernel: its own copies are not interpreted, and only lowered (below)."""
    sizes = [64, 0, 80]
    x, w, group_sizes = inputs(sizes, 13, 2, 128, 192)
    rows = np.random.default_rng(1).integers(0, 13, sum(sizes)).astype(np.int32)
    found = compiled(combine=silu_product)(x, w.at[1].set(jnp.nan), group_sizes, rows=rows)
    right = expected(np.asarray(x, np.float32)[rows], w, sizes)
    assert_close("y", np.asarray(found, np.float32), right, BOUND)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("tallest", [48, 144])
@pytest.mark.parametrize("sizes", [*SIZES.values(), [1000, 0, 264, 1152]], ids=[*SIZES, "many"])
def test_units_cover_each_row_and_column_once(sizes: list[int], tallest: int, columns: int) -> None:
    """And the pieces of a group are as few and as equal as can be."""
    rows = sum(sizes) + 40
    head, units = list_units(jnp.asarray(sizes, jnp.int32), rows, columns, tallest, interpret=True)
    count = np.zeros((rows, columns), int)
    group_of_row = np.repeat(np.arange(len(sizes)), sizes)
    listed = np.asarray(units).reshape(-1, FIELDS)[: int(head[0])]
    for group, row, size, column, height in listed:
        assert 0 < size <= height <= tallest and (group_of_row[row : row + size] == group).all()
        pieces = -(-sizes[group] // tallest)
        assert height == -(-sizes[group] // (8 * pieces)) * 8
        count[row : row + size, column] += 1
    assert int(head[1]) == sum(sizes)
    np.testing.assert_array_equal(count[: sum(sizes)], 1)
    assert not count[sum(sizes) :].any()


@pytest.mark.parametrize(
    ("rows", "dtype", "inner", "wanted"),
    [
        (256 * 96, jnp.bfloat16, 512, 8),
        (256 * 96, jnp.bfloat16, 256, 8),
        (256 * 96, jnp.bfloat16, 128, 1),  # of four ranks, whose products of down are too short
        (256 * 96, jnp.bfloat16, 320, 1),  # not whole tiles of gate and up
        (256 * 96, jnp.float32, 512, 1),
        (256 * 95, jnp.bfloat16, 512, 1),
    ],
)
def test_prefers_whole_tiles_where_the_kernel_covers_all_products(
    rows: int, dtype: Any, inner: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "on_hopper", lambda: True)
    shapes = (256, 2, inner, 2048), (256, 2048, inner)
    matrices = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    assert preferred_alignment(rows, dtype, *matrices, implementation="pallas") == wanted
    assert preferred_alignment(rows, dtype, *matrices, implementation="xla") == 1


def test_lowers_for_cuda() -> None:
    """Qwen3.5-35B-A3B, a prefill of 8,192 tokens."""
    sizes, rows = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (256, 8 * 8192 + 2048))
    options: Any = dict(implementation="pallas", dtype=jnp.bfloat16, aligned=8)
    for combine, x, w in (
        (silu_product, (8192, 2048), (256, 2, 512, 2048)),
        (None, (rows.shape[0], 512), (256, 2048, 512)),
    ):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w)]
        op = functools.partial(grouped_matmul, combine=combine, **options)
        index = [] if combine is None else [rows]
        text = lower_for_cuda(
            lambda x, w, s, *r, op=op: op(x, w, s, rows=r[0] if r else None), *arrays, sizes, *index
        )
        assert text.count("mosaic_gpu") >= 1
