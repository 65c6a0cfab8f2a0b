"""Few rows against streamed weights: both kernels, interpreted, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import MULTIPROCESSORS
from pallas_kernels.skinny_matmul import Product, kernel, skinny_matmul, skinny_matmuls
from pallas_kernels.skinny_matmul.tuning import LARGE, MAX_VECTOR_ROWS, SHARED, SkinnyTuning
from tests.assertions import assert_close

BOUND = 5e-3
TUNINGS = [
    SkinnyTuning(2, 256, 1),
    SkinnyTuning(1, 256, 1, unroll=2),
    SkinnyTuning(8, 512, 4, unroll=2),
    SkinnyTuning(2, 256, 2, unroll=5),
]
MATRIX_TUNINGS = [
    SkinnyTuning(16, 128, 2, stages=7, matrix=True, narrow=True),
    SkinnyTuning(16, 256, 4, stages=3, matrix=True),
    SkinnyTuning(64, 64, 4, stages=3, matrix=True),
]


def silu_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.silu(a) * b


def inputs(rows: int, groups: int, count: int, inner: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, inner)), jnp.bfloat16)
    return x, jnp.asarray(rng.normal(size=(groups, count, inner)) * inner**-0.5, jnp.bfloat16)


def expected(x: Any, weights: jax.Array) -> np.ndarray:
    parts = [np.asarray(x, np.float64) @ np.asarray(w, np.float64).T for w in weights]
    return parts[0] if len(parts) == 1 else parts[0] / (1 + np.exp(-parts[0])) * parts[1]


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 17, 32])
@pytest.mark.parametrize("groups", [1, 2])
def test_kernel_against_float64(rows: int, groups: int) -> None:
    x, weights = inputs(rows, groups, 48, 1280)
    combine = silu_product if groups == 2 else None
    out = skinny_matmul(x, weights, combine, implementation="pallas", interpret=True)
    assert out.dtype == jnp.bfloat16
    assert_close("out", out.astype(jnp.float32), expected(x, weights), BOUND)


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_normed_rows(rows: int, implementation: Any) -> None:
    x, weights = inputs(rows, 2, 32, 1280)
    scale = jnp.asarray(np.random.default_rng(9).normal(size=1280), jnp.float32)
    options: Any = {"norm": (scale, 1e-6), "implementation": implementation, "interpret": True}
    out = skinny_matmul(x, weights, silu_product, **options)
    wide = np.asarray(x, np.float64)
    wide *= np.asarray(scale, np.float64) / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    # the XLA form rounds to bf16 three times: the rows, the products, the result
    bound = BOUND if implementation == "pallas" else 2 * BOUND
    assert_close("out", out.astype(jnp.float32), expected(wide, weights), bound)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_float32_result_is_not_rounded(implementation: Any) -> None:
    x, weights = inputs(3, 1, 32, 256)
    out = skinny_matmul(
        x, weights, dtype=jnp.float32, implementation=implementation, interpret=True
    )
    assert out.dtype == jnp.float32
    assert_close("out", out, expected(x, weights), 1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weights = inputs(16, 1, 32, 512)
    whole = skinny_matmul(x, weights, implementation="pallas", interpret=True)
    other = skinny_matmul(x.at[1:].set(jnp.nan), weights, implementation="pallas", interpret=True)
    np.testing.assert_array_equal(whole[0], other[0])


def test_xla_form_agrees_on_many_rows() -> None:
    x, weights = inputs(100, 2, 32, 256)
    out = skinny_matmul(x, weights, silu_product)
    assert_close("out", out.astype(jnp.float32), expected(x, weights), BOUND)


def test_uncovered_shapes_are_refused_by_name() -> None:
    x, weights = inputs(33, 1, 32, 256)
    with pytest.raises(NotImplementedError, match="32 rows"):
        skinny_matmul(x, weights, implementation="pallas", interpret=True)
    with pytest.raises(ValueError, match="2 weight matrices"):
        skinny_matmul(*inputs(2, 2, 32, 256))


@pytest.mark.parametrize("rows", [2, 32])
def test_lowers_for_cuda(rows: int) -> None:
    x, weights = inputs(rows, 2, 64, 512)

    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        return skinny_matmul(x, weights, silu_product, implementation="pallas")

    lowered = jax.jit(run).trace(x, weights).lower(lowering_platforms=("cuda",))
    assert "__gpu$xla.gpu.triton" in lowered.as_text()


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("groups", [1, 2])
def test_residual(rows: int, implementation: Any, groups: int) -> None:
    x, weights = inputs(rows, groups, 48, 256)
    residual = jnp.asarray(np.random.default_rng(3).normal(size=(rows, 48)), jnp.bfloat16)
    combine = silu_product if groups == 2 else None
    options: Any = {"implementation": implementation, "interpret": True}
    out = skinny_matmul(x, weights, combine, residual=residual, **options)
    whole = expected(x, weights) + np.asarray(residual, np.float64)
    bound = BOUND if implementation == "pallas" else 2 * BOUND
    assert_close("out", out.astype(jnp.float32), whole, bound)


@pytest.mark.parametrize("rows", [2, 16])
def test_products_of_one_launch_are_those_of_several(rows: int) -> None:
    """Sizes, results' types, residuals and combinations of their own, under one norm."""
    x, gated = inputs(rows, 2, 48, 1280)
    scale = jnp.asarray(np.random.default_rng(9).normal(size=1280), jnp.float32)
    single, small = inputs(rows, 1, 96, 1280)[1], inputs(rows, 1, 16, 1280)[1]
    products = (
        Product(single, residual=jnp.ones((rows, 96), jnp.bfloat16)),
        Product(jnp.concatenate([small, -small]), dtype=jnp.float32),
        Product(gated, silu_product),
    )
    options: Any = {"implementation": "pallas", "interpret": True}
    together = skinny_matmuls(x, products, (scale, 1e-6), **options)
    assert [y.shape[1] for y in together] == [96, 16, 16, 48]
    np.testing.assert_array_equal(together[1], -together[2])
    each = [y for p in products for y in skinny_matmuls(x, (p,), (scale, 1e-6), **options)]
    for y, alone in zip(together, each, strict=True):
        assert y.dtype == alone.dtype
        rounding = 1e-6 if y.dtype == jnp.float32 else 1e-3
        assert_close("out", y.astype(jnp.float32), alone.astype(jnp.float32), rounding)


@pytest.mark.parametrize("rows", [1, MAX_VECTOR_ROWS])
@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_every_way_to_walk_gives_the_same_sums(tuning: SkinnyTuning, rows: int) -> None:
    x, weights = inputs(rows, 2, 48, 1280)
    scale = jnp.asarray(np.random.default_rng(9).normal(size=1280), jnp.float32)
    product, norm = (Product(weights, silu_product, jnp.float32),), (scale, 1e-6)
    default = kernel.skinny_matmuls(x, product, norm, interpret=True)[0]
    out = kernel.skinny_matmuls(x, product, norm, tuning=tuning, interpret=True)[0]
    assert_close("out", out, default, 1e-6)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("tuning", MATRIX_TUNINGS, ids=str)
def test_tensor_cores_take_any_rows(tuning: SkinnyTuning, rows: int) -> None:
    """A norm inside (narrow) scales the products, one before them the rows: the same result."""
    x, weights = inputs(rows, 1, 48, 1280)
    scale = jnp.asarray(np.random.default_rng(9).normal(size=1280), jnp.float32)
    residual = jnp.ones((rows, 48), jnp.float32)
    product = (Product(weights, None, jnp.float32, residual),)
    out = kernel.skinny_matmuls(x, product, (scale, 1e-6), tuning=tuning, interpret=True)[0]
    wide = np.asarray(x, np.float64)
    wide *= np.asarray(scale, np.float64) / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    assert_close("out", out, expected(wide, weights) + 1, BOUND)


MODELS = [(2560, 9216), (5120, 17408), (2048, 512), (2304, 9216)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 24, 32])
def test_defaults_fit_on_the_chip(rows: int) -> None:
    """The programs that are to be on a multiprocessor at once have room for their stages."""
    for hidden, width in MODELS:
        cases: list[tuple[int, list[tuple[int, int]]]] = [
            (hidden, [(1, 12288), (2, 48)]),
            (hidden, [(2, width)]),
            (hidden, [(1, 248320)]),
            (width, [(1, hidden)]),
        ]
        for inner, matrices in cases:
            form = SkinnyTuning.default(rows, inner, matrices, normed=True)
            large = 2 * inner * sum(g * n for g, n in matrices) >= LARGE
            assert form.matrix == (rows > 2 or (rows == 2 and large))
            assert form.narrow == (form.matrix and rows <= 8 and matrices[0][0] == 1)
            if not form.matrix:
                assert form.stages == 1
                continue
            lines = form.outputs * matrices[0][0] + form.columns(rows)
            held = 2 * form.inner * lines * (form.stages - (form.warps != 4))
            programs = sum(-(-n // form.outputs) for _, n in matrices)
            together = -(-programs // MULTIPROCESSORS) if programs < 1000 else 2
            assert form.stages >= 3
            assert held * together < SHARED, (form, matrices)


def test_default_of_one_row() -> None:
    """Elementwise: what was measured to be the fastest, for Qwen3.5-4B and Qwen3.6-27B."""

    def form(inner: int, *matrices: tuple[int, int]) -> tuple[int, int, int, int]:
        t = SkinnyTuning.default(1, inner, matrices, normed=True).fit(inner)
        assert not t.matrix
        return t.outputs, t.inner, t.warps, t.unroll

    assert form(2560, (1, 12288), (2, 32)) == form(2560, (1, 248320)) == (2, 512, 1, 5)
    assert form(2560, (2, 9216)) == (2, 512, 2, 5)
    assert (form(4096, (1, 2560)), form(9216, (1, 2560))) == ((2, 1024, 4, 4), (2, 1024, 4, 3))
    assert form(5120, (1, 16384), (2, 48)) == form(17408, (1, 5120)) == (2, 512, 1, 2)
    assert (form(5120, (2, 17408)), form(6144, (1, 5120))) == ((2, 512, 1, 5), (2, 512, 1, 4))


def test_default_of_known_shapes() -> None:
    """Qwen3.6-27B: what was measured to be the fastest, but for a stage's width."""

    def form(rows: int, inner: int, *matrices: tuple[int, int]) -> tuple[int, int, int, int]:
        t = SkinnyTuning.default(rows, inner, matrices, inner == 5120)
        return t.outputs, t.inner, t.warps, t.stages

    assert form(2, 5120, (1, 16384), (2, 48)) == form(2, 5120, (1, 248320)) == (64, 128, 2, 7)
    assert form(2, 17408, (1, 5120)) == (32, 128, 2, 6)
    assert form(24, 5120, (2, 17408)) == (64, 64, 4, 3)
    assert form(24, 5120, (1, 248320)) == (64, 128, 4, 4)
    assert form(24, 17408, (1, 5120)) == form(24, 6144, (1, 5120)) == (64, 128, 4, 9)
    assert form(24, 4096, (1, 2560)) == (32, 256, 2, 8)
