"""Many rows against one or two matrices: the kernel, interpreted, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiled_matmul import tiled_matmul
from pallas_kernels.tiled_matmul.tuning import TiledTuning
from tests.assertions import assert_close
from tests.kernels.lowering import lower_for_cuda

BOUND = 1e-2  # two roundings to bfloat16


def silu_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.silu(a) * b


def inputs(rows: int, groups: int, width: int = 128, inner: int = 320) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, inner)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(groups, width, inner)) * inner**-0.5, jnp.bfloat16)
    return x, weights


def expected(x: Any, weights: Any) -> np.ndarray:
    parts = [np.asarray(x, np.float64) @ np.asarray(w, np.float64).T for w in weights]
    return parts[0] if len(parts) == 1 else parts[0] / (1 + np.exp(-parts[0])) * parts[1]


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("groups", [1, 2])
def test_against_float64(implementation: Any, groups: int) -> None:
    """Three tiles of rows for two blocks."""
    rows = 384
    x, weights = inputs(rows, groups)
    combine = silu_product if groups == 2 else None
    out = tiled_matmul(x, weights, combine, implementation=implementation, interpret=True)
    assert out.shape == (rows, 128) and out.dtype == jnp.bfloat16
    assert_close("out", out.astype(jnp.float32), expected(x, weights), BOUND)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("count", [0, 1, 128, 129, 384])
def test_rows_past_the_count_touch_nothing(implementation: Any, count: int) -> None:
    x, weights = inputs(384, 2)
    poisoned = x.at[count:].set(jnp.nan)
    run = jax.jit(
        lambda x, count: tiled_matmul(
            x, weights, silu_product, count, implementation=implementation, interpret=True
        )
    )
    out = run(poisoned, jnp.int32(count))
    right = expected(x, weights)[:count]
    if count:
        assert_close("wanted", out[:count].astype(jnp.float32), right, BOUND)
    unwanted = np.asarray(out[-(-count // 128) * 128 :], np.float32)
    np.testing.assert_array_equal(unwanted, 0)


def test_lowers_for_cuda() -> None:
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(512, 2560), (2, 256, 2560)]]
    count = jax.ShapeDtypeStruct((), jnp.int32)
    text = lower_for_cuda(
        lambda x, w, n: tiled_matmul(x, w, silu_product, n, implementation="pallas"),
        *avals,
        count,
    )
    assert "mosaic_gpu" in text


def test_what_the_kernel_does_not_take() -> None:
    x, weights = inputs(128, 1, width=96)
    with pytest.raises(NotImplementedError, match="96"):
        tiled_matmul(x, weights, implementation="pallas", interpret=True)
    with pytest.raises(ValueError, match="2 weight matrices"):
        tiled_matmul(x, jnp.concatenate([weights, weights]))


@pytest.mark.parametrize(("rows", "width", "fills"), [(8192, 9216, True), (1024, 1280, False)])
def test_few_tiles_are_left_to_the_library(rows: int, width: int, fills: bool) -> None:
    x: Any = jax.ShapeDtypeStruct((rows, 2560), jnp.bfloat16)
    weights: Any = jax.ShapeDtypeStruct((2, width, 2560), jnp.bfloat16)
    assert TiledTuning().fits(x, weights) and TiledTuning().fills(x, weights) == fills
