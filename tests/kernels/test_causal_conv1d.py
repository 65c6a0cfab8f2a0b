"""Short convolution: dense, ragged with windows in slots, decode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    CONTINUE,
    NO_SLOT,
    Segments,
    decode_causal_conv1d,
    dense_causal_conv1d,
    ragged_causal_conv1d,
)

from ..assertions import assert_close
from . import oracle

CHANNELS, SIZE = 6, 4
rng = np.random.default_rng(0)
WEIGHT = rng.standard_normal((CHANNELS, SIZE)).astype(np.float32)
ZEROS = np.zeros((SIZE - 1, CHANNELS), np.float32)


def rows(length: int) -> np.ndarray:
    return rng.standard_normal((length, CHANNELS)).astype(np.float32)


def test_dense_starts_from_zeros() -> None:
    x = np.stack([rows(9), rows(9)])
    y = dense_causal_conv1d(jnp.asarray(x), jnp.asarray(WEIGHT))
    for n in range(2):
        assert_close("y", y[n], oracle.causal_conv1d(x[n], WEIGHT, ZEROS)[0], 1e-6)


def test_ragged_windows_come_from_and_go_to_slots() -> None:
    """Sequences shorter than the window, an empty one, and windows at interior depths."""
    pool = np.full((8, 2, SIZE - 1, CHANNELS), np.nan, np.float32)
    pool[5, 1], pool[6, 1] = rows(SIZE - 1), rows(SIZE - 1)
    lengths, begin = (7, 1, 0, 2), (pool[5, 1], ZEROS, pool[6, 1], pool[6, 1])
    x = rows(12)
    cu = jnp.array([0, 2, 7, 8, 8, 10, 10], jnp.int32)
    load = jnp.array([5, CONTINUE, NO_SLOT, 6, 6, NO_SLOT], jnp.int32)
    store = jnp.array([0, 1, 2, 3, 4, NO_SLOT], jnp.int32)
    y, after = jax.jit(ragged_causal_conv1d)(x, WEIGHT, pool, 1, Segments(cu, load, store))
    start = 0
    for n, (length, slot) in enumerate(zip(lengths, (1, 2, 3, 4), strict=True)):
        part = x[start : start + length]
        if length:
            expected, window = oracle.causal_conv1d(part, WEIGHT, begin[n])
            assert_close("y", y[start : start + length], expected, 1e-6)
        else:
            window = begin[n]
        np.testing.assert_array_equal(after[slot, 1], window.astype(np.float32))
        start += length
    _, window = oracle.causal_conv1d(x[:2], WEIGHT, begin[0])
    np.testing.assert_array_equal(after[0, 1], window.astype(np.float32))
    assert np.isnan(np.asarray(after)[:7, 0]).all()


def test_decode_shifts_the_window() -> None:
    pool = np.full((4, 1, SIZE - 1, CHANNELS), np.nan, np.float32)
    pool[2, 0] = rows(SIZE - 1)
    x = rows(2)
    slots = jnp.array([2, NO_SLOT], jnp.int32)
    y, after = jax.jit(decode_causal_conv1d)(x, WEIGHT, pool, 0, slots)
    expected, window = oracle.causal_conv1d(x[:1], WEIGHT, pool[2, 0])
    assert_close("y", y[0], expected[0], 1e-6)
    np.testing.assert_array_equal(after[2, 0], window.astype(np.float32))
