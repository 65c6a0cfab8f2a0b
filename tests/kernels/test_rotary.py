"""Queries and keys normalised, rotated and written to pages: kernel and XLA against numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rotate_and_write
from tests.assertions import assert_close

from .lowering import TRITON_CALL, lower_for_cuda

EPS, THETA, PAGES, PAGE, LAYERS = 1e-6, 1e4, 5, 4, 2
SLOTS = [17, -1, 4, 3]  # of four tokens: no two alike, one not written


def normed(x: Any, scale: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x if scale is None else scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def rotated(x: np.ndarray, positions: np.ndarray, rotary_dim: int) -> np.ndarray:
    half = rotary_dim // 2
    frequency = THETA ** -(np.arange(half) / max(half, 1))
    turn = np.exp(1j * positions[:, None] * frequency)[:, None]
    pairs = (x[..., :half] + 1j * x[..., half:rotary_dim]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., rotary_dim:]], axis=-1)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(24, 8), (16, 16), (8, 0)])
def test_against_numpy(implementation: Any, norms: bool, dim: int, rotary_dim: int) -> None:
    rng = np.random.default_rng(dim)
    q = rng.normal(size=(4, 6, 2, dim)).astype(np.float32)
    q[:, :, 1] = np.nan  # gates, which are not read
    k, v = (rng.normal(size=(4, 2, n)).astype(np.float32) for n in (dim, 12))
    scales = tuple(rng.normal(size=dim).astype(np.float32) for _ in range(2)) if norms else None
    keys = np.full((PAGES, LAYERS, PAGE, 2, dim), 7, np.float32)
    values = np.full((PAGES, LAYERS, PAGE, 2, 12), 7, np.float32)
    positions = np.array([300, -1, 5, 0], np.int32)
    args = (
        jnp.asarray(k), jnp.asarray(v),
        None if scales is None else (jnp.asarray(scales[0]), jnp.asarray(scales[1])),
        EPS, jnp.asarray(positions), rotary_dim, THETA, jnp.asarray(keys), jnp.asarray(values),
        1, jnp.asarray(SLOTS, jnp.int32),
    )  # fmt: skip
    run = functools.partial(rotate_and_write, implementation=implementation, interpret=True)
    found = run(jnp.asarray(q), *args)
    assert found[0] is not None
    wanted_q = rotated(normed(q[:, :, 0], scales and scales[0]), positions, rotary_dim)
    wanted_k = rotated(normed(k, scales and scales[1]), positions, rotary_dim)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            keys[slot // PAGE, 1, slot % PAGE] = wanted_k[token]
            values[slot // PAGE, 1, slot % PAGE] = v[token]
    assert_close("q", found[0], wanted_q, 1e-5)
    assert_close("keys", found[1], keys, 1e-5)
    np.testing.assert_array_equal(found[2], values)

    without = run(None, *args)
    assert without[0] is None
    for pool, same in zip(without[1:], found[1:], strict=True):
        np.testing.assert_array_equal(pool, same)


def test_refuses_what_it_does_not_cover() -> None:
    q, kv = jnp.zeros((3, 2, 1, 8)), jnp.zeros((3, 1, 8))
    pool, at = jnp.zeros((PAGES, 1, PAGE, 1, 8)), jnp.zeros(3, jnp.int32)
    args = (q, kv, kv, None, EPS, at, 6, THETA, pool, pool, 0, at)
    with pytest.raises(NotImplementedError, match="powers of two"):
        rotate_and_write(*args, implementation="pallas", interpret=True)


@pytest.mark.parametrize("dim", [64, 192, 256])
def test_lowers_for_cuda(dim: int) -> None:
    scale, at = jnp.ones(dim), jnp.zeros(2, jnp.int32)
    pool = jnp.zeros((PAGES, LAYERS, 16, 4, dim), jnp.bfloat16)
    q, kv = (jnp.zeros((2, *heads, dim), jnp.bfloat16) for heads in ((16, 2), (4,)))
    run = functools.partial(rotate_and_write, implementation="pallas")

    def step(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
        return run(q, k, v, (scale, scale), EPS, at, 64, THETA, keys, values, 1, at)

    assert TRITON_CALL in lower_for_cuda(step, q, kv, kv, pool, pool)
    write = functools.partial(step, None)
    assert TRITON_CALL in lower_for_cuda(write, kv, kv, pool, pool)
