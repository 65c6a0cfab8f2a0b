"""Gated RMS norm of heads: the kernel, interpreted, and the XLA form against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_rms_norm
from tests.assertions import assert_close

from .lowering import TRITON_CALL, lower_for_cuda

EPS = 1e-6
# tokens, key heads, value heads of each, their width, channels before the gates
SHAPES = [(1, 2, 3, 16, 32), (2, 2, 1, 96, 0), (19, 2, 2, 32, 8), (16, 1, 1, 512, 0)]


def inputs(tokens: int, key_heads: int, group: int, width: int, first: int) -> Any:
    rng = np.random.default_rng(tokens)
    o = jnp.asarray(rng.normal(size=(tokens, key_heads * group, width)), jnp.bfloat16)
    gate = rng.normal(size=(tokens, key_heads, first + group * width))
    gate[..., :first] = np.nan  # what belongs to others
    return o, jnp.asarray(rng.normal(size=width), jnp.float32), jnp.asarray(gate, jnp.bfloat16)


def expected(o: Any, weight: Any, gate: Any, first: int) -> np.ndarray:
    o, weight, gate = (np.asarray(x, np.float64) for x in (o, weight, gate))
    normed = weight * o / np.sqrt((o**2).mean(axis=-1, keepdims=True) + EPS)
    return normed / (1 + np.exp(-gate[..., first:].reshape(o.shape)))


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(implementation: Any, shape: tuple[int, ...]) -> None:
    o, weight, gate = inputs(*shape)
    how: Any = {"implementation": implementation, "interpret": True}
    found = gated_rms_norm(o, weight, gate, shape[4], EPS, jax.nn.sigmoid, jnp.float32, **how)
    assert_close("out", found, expected(o, weight, gate, shape[4]), 1e-6)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_some_rows_of_a_larger_array(implementation: Any) -> None:
    """19 tokens from the 7th on; what lies before and behind them is not read."""
    o, weight, gate = inputs(19, 2, 2, 32, 8)
    more = jnp.pad(o, ((7, 5), (0, 0), (0, 0)), constant_values=jnp.nan)
    how: Any = {"implementation": implementation, "interpret": True}

    @jax.jit
    def run(start: jax.Array) -> jax.Array:
        args = (more, weight, gate, 8, EPS, jax.nn.sigmoid, jnp.float32, start)
        return gated_rms_norm(*args, **how)

    assert_close("out", run(jnp.int32(7)), expected(o, weight, gate, 8), 1e-6)


def test_rounds_to_the_dtype_asked_for() -> None:
    o, weight, gate = inputs(3, 1, 2, 16, 0)
    found = gated_rms_norm(o, weight, gate, 0, EPS, jax.nn.sigmoid, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16


def test_refuses_what_it_does_not_cover() -> None:
    o, weight, gate = inputs(3, 2, 2, 16, 8)
    with pytest.raises(ValueError, match="40 channels"):
        gated_rms_norm(o, weight, gate, 0, EPS, jax.nn.silu, jnp.float32)
    whole: Any = {"implementation": "pallas", "interpret": True}
    with pytest.raises(NotImplementedError, match="packed tokens"):
        gated_rms_norm(o[None], weight, gate[None], 8, EPS, jax.nn.silu, jnp.float32, **whole)


@pytest.mark.parametrize("tokens", [2, 2048])
def test_lowers_for_cuda(tokens: int) -> None:
    o, weight, gate = inputs(tokens, 2, 2, 128, 512)

    def run(o: jax.Array, gate: jax.Array) -> jax.Array:
        arguments = (o, weight, gate, 512, EPS, jax.nn.silu, jnp.bfloat16)
        return gated_rms_norm(*arguments, implementation="pallas")

    assert TRITON_CALL in lower_for_cuda(run, o, gate)
