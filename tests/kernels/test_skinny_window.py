"""A short convolution behind a decode step's product, in its launch, against the two ops."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Product, Window, decode_causal_conv1d, skinny_matmuls
from pallas_kernels.skinny_matmul import rms_norm

from ..assertions import assert_close
from .lowering import TRITON_CALL, lower_for_cuda

INNER, SLOTS, LAYERS, TAPS = 64, 40, 2, 4
HEADS = {"beside_gates": (2, 96, 64), "all": (3, 48, 48)}  # heads, channels, convolved ones


def inputs(rows: int, heads: int, channels: int, width: int) -> tuple[Any, ...]:
    """x, norm, matrix, a product beside, and a window whose pool is poisoned where nobody reads."""
    rng = np.random.default_rng(rows)

    def some(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    slots = rng.permutation(SLOTS)[:rows].astype(np.int32)
    slots[1::3] = -1
    pool = np.full((SLOTS, LAYERS, TAPS - 1, heads * width), np.nan, np.float32)
    for slot in slots[slots >= 0]:
        pool[slot, 1] = rng.normal(size=pool.shape[2:])
    window = Window(some(heads, width, TAPS), jnp.asarray(pool, jnp.bfloat16), 1, jnp.array(slots))
    norm = jnp.asarray(rng.normal(size=INNER), jnp.float32), 1e-6
    beside = Product(some(2, 16, INNER), dtype=jnp.float32)
    return some(rows, INNER), norm, some(1, heads * channels, INNER), beside, window


@functools.cache
def compiled(implementation: str, eps: float) -> Any:
    def run(x: Any, weight: Any, matrix: Any, beside: Any, window: Window) -> Any:
        products = Product(matrix, window=window), Product(beside, dtype=jnp.float32)
        options: Any = {"implementation": implementation, "interpret": True}
        return skinny_matmuls(x, products, (weight, eps), **options)

    return jax.jit(run)


@pytest.mark.parametrize("rows", [1, 4, 7, 20])
@pytest.mark.parametrize("sizes", HEADS.values(), ids=HEADS)
def test_against_two_ops(rows: int, sizes: tuple[int, int, int]) -> None:
    x, norm, matrix, beside, window = inputs(rows, *sizes)
    heads, channels, _ = sizes
    raw, y, pool, *gates = compiled("pallas", norm[1])(x, norm[0], matrix, beside.weights, window)

    h = np.asarray(rms_norm(x, *norm), np.float64)
    assert_close("raw", raw.astype(jnp.float32), h @ np.asarray(matrix[0], np.float64).T, 5e-3)
    for found, w in zip(gates, beside.weights, strict=True):
        assert_close("beside", found, h @ np.asarray(w, np.float64).T, 5e-3)
    # what the convolution makes of the very values that the product left
    taken = raw.reshape(rows, heads, channels)
    right, shifted = decode_causal_conv1d(taken, *window, implementation="xla")
    right = right.reshape(rows, -1).astype(jnp.float32)
    assert_close("y", y.astype(jnp.float32), right, 3e-3)
    np.testing.assert_array_equal(pool.astype(jnp.float32), shifted.astype(jnp.float32))


@pytest.mark.parametrize("rows", [2, 40])
def test_by_xla(rows: int) -> None:
    """Of as many rows as one likes: the product and, behind it, the convolution."""
    x, norm, matrix, beside, window = inputs(rows, *HEADS["beside_gates"])
    raw, y, pool, *gates = compiled("xla", norm[1])(x, norm[0], matrix, beside.weights, window)
    assert len(gates) == 2
    h = np.asarray(rms_norm(x, *norm), np.float64)
    assert_close("raw", raw.astype(jnp.float32), h @ np.asarray(matrix[0], np.float64).T, 5e-3)
    right, shifted = decode_causal_conv1d(raw.reshape(rows, 2, 96), *window, implementation="xla")
    for found, wanted in ((y, right.reshape(rows, -1)), (pool, shifted)):
        np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))


@pytest.mark.parametrize("rows", [2, 24])
def test_lowers_for_cuda(rows: int) -> None:
    """Qwen3.5-4B: 16 heads of 768 channels, 512 of them convolved; for few rows two launches."""
    bf16 = jnp.bfloat16
    shapes = (
        ((rows, 2560), bf16),
        ((1, 16 * 768, 2560), bf16),
        ((16, 512, 4), bf16),
        ((9, 24, 3, 16 * 512), bf16),
        ((rows,), jnp.int32),
    )

    def step(x: Any, w: Any, taps: Any, pool: Any, slots: Any) -> Any:
        window = Window(taps, pool, 3, slots)
        norm = jnp.ones(2560), 1e-6
        return skinny_matmuls(x, (Product(w, window=window),), norm, implementation="pallas")

    text = lower_for_cuda(step, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert text.count(TRITON_CALL) == (2 if rows == 2 else 1)
