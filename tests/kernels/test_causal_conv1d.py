"""Short convolution: dense, ragged with windows in slots, decode."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    CONTINUE,
    NO_SLOT,
    Part,
    Segments,
    decode_causal_conv1d,
    dense_causal_conv1d,
    ragged_causal_conv1d,
)
from pallas_kernels.arg_specs import segments_shape
from pallas_kernels.causal_conv1d.prefill import ragged_prefill
from pallas_kernels.causal_conv1d.tuning import ConvTuning

from ..assertions import assert_close
from . import oracle
from .lowering import TRITON_CALL, lower_for_cuda

CHANNELS, SIZE = 6, 4
IMPLEMENTATIONS = ("xla", "pallas")
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


@functools.cache
def compiled(op: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    options = {"implementation": implementation, "interpret": implementation == "pallas"}
    return jax.jit(functools.partial(op, **options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ragged_windows_come_from_and_go_to_slots(implementation: str) -> None:
    """Sequences shorter than the window, an empty one, and windows at interior depths."""
    pool = np.full((9, 2, SIZE - 1, CHANNELS), np.nan, np.float32)
    for slot in (5, 6, 7):
        pool[slot, 1] = rows(SIZE - 1)
    lengths = (7, 1, 0, 2, 3)
    begin = (pool[5, 1], ZEROS, pool[6, 1], pool[6, 1], pool[7, 1])
    x = rows(15)  # 2 rows of padding
    cu = jnp.array([0, 2, 7, 8, 8, 10, 11, 12, 13, 13], jnp.int32)
    load = [5, CONTINUE, NO_SLOT, 6, 6, 7, CONTINUE, CONTINUE, NO_SLOT]
    store = [0, 1, 2, 3, 4, 7, NO_SLOT, 8, NO_SLOT]  # slot 7 is updated in place, then left
    segments = Segments(cu, jnp.array(load, jnp.int32), jnp.array(store, jnp.int32))
    op = compiled(ragged_causal_conv1d, implementation)
    y, after = op(x, WEIGHT, pool, 1, segments)
    start = 0
    for n, (length, slot) in enumerate(zip(lengths, (1, 2, 3, 4, 8), strict=True)):
        part = x[start : start + length]
        if length:
            expected, window = oracle.causal_conv1d(part, WEIGHT, begin[n])
            assert_close("y", y[start : start + length], expected, 1e-6)
        else:
            window = begin[n]
        np.testing.assert_array_equal(after[slot, 1], window.astype(np.float32))
        start += length
    for first, size, slot, n in ((0, 2, 0, 0), (10, 1, 7, 4)):
        _, window = oracle.causal_conv1d(x[first : first + size], WEIGHT, begin[n])
        np.testing.assert_array_equal(after[slot, 1], window.astype(np.float32))
    np.testing.assert_array_equal(after[5:7], pool[5:7])  # only read
    assert np.isnan(np.asarray(after)[:, 0]).all()
    assert np.isfinite(np.asarray(y)).all()  # rows of padding too


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chain_without_tokens_passes_its_window_on(implementation: str) -> None:
    pool = np.full((3, 1, SIZE - 1, CHANNELS), np.nan, np.float32)
    pool[2] = rows(SIZE - 1)
    segments = Segments(
        *(jnp.array(y, jnp.int32) for y in ([0, 0, 0], [2, CONTINUE], [NO_SLOT, 0]))
    )
    y, after = compiled(ragged_causal_conv1d, implementation)(rows(4), WEIGHT, pool, 0, segments)
    np.testing.assert_array_equal(after[0], pool[2])
    assert np.isnan(np.asarray(after)[1]).all()
    assert np.isfinite(np.asarray(y)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_shifts_the_window(implementation: str) -> None:
    pool = np.full((5, 1, SIZE - 1, CHANNELS), np.nan, np.float32)
    pool[2, 0], pool[0, 0] = rows(SIZE - 1), rows(SIZE - 1)
    x = rows(3)
    slots = jnp.array([2, NO_SLOT, 0], jnp.int32)
    y, after = compiled(decode_causal_conv1d, implementation)(x, WEIGHT, pool, 0, slots)
    for n, slot in ((0, 2), (2, 0)):
        expected, window = oracle.causal_conv1d(x[n : n + 1], WEIGHT, pool[slot, 0])
        assert_close("y", y[n], expected[0], 1e-6)
        np.testing.assert_array_equal(after[slot, 0], window.astype(np.float32))
    assert np.isnan(np.asarray(after)[[1, 3, 4]]).all()
    assert np.isfinite(np.asarray(y)).all()


TUNING = ConvTuning(channels=16, rows=32, unrolled=8)
tiled = jax.jit(functools.partial(ragged_prefill, tuning=TUNING, interpret=True))


@pytest.mark.parametrize("length", [1, 3, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_kernel_cuts_any_length_into_tiles(length: int, dtype: Any) -> None:
    """bfloat16 inputs are exact; only the output is rounded. Two heads of several blocks."""
    draw = np.random.default_rng(length)
    x, weight, window = (
        jnp.asarray(draw.standard_normal(size), dtype)
        for size in ((100, 2, 48), (2, 48, 4), (3, 96))
    )
    pool = jnp.full((2, 1, 3, 96), jnp.nan, dtype).at[1, 0].set(window)
    segments = Segments(*(jnp.array(y, jnp.int32) for y in ([0, length], [1], [1])))
    y, after = tiled(x, weight, pool, 0, segments)
    flat = (x[:length].reshape(length, 96), weight.reshape(96, 4), window)
    expected, last = oracle.causal_conv1d(*(np.asarray(z.astype(jnp.float32)) for z in flat))
    bound = 1e-6 if dtype == jnp.float32 else 3e-3
    assert_close("y", y[:length].reshape(length, 96).astype(jnp.float32), expected, bound)
    np.testing.assert_array_equal(after[1, 0].astype(jnp.float32), last.astype(np.float32))
    assert jnp.isfinite(y.astype(jnp.float32)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_channels_beside_are_not_read(implementation: str) -> None:
    """Two heads of 6 channels, each with 2 more behind them, as one projection leaves them."""
    wide = np.full((9, 2, 8), np.nan, np.float32)
    wide[..., :CHANNELS] = rng.standard_normal((9, 2, CHANNELS))
    weight = jnp.asarray(np.stack([WEIGHT, WEIGHT[::-1]]))
    x, flat_weight = jnp.asarray(wide), weight.reshape(12, SIZE)
    flat = x[..., :CHANNELS].reshape(9, 12)
    pool = jnp.asarray(rng.standard_normal((3, 1, SIZE - 1, 12)), jnp.float32)
    segments = Segments(*(jnp.array(y, jnp.int32) for y in ([0, 5, 9], [2, NO_SLOT], [0, 1])))
    slots = jnp.arange(3, dtype=jnp.int32)
    cases: Any = (
        (ragged_causal_conv1d, 9, segments),
        (decode_causal_conv1d, 3, slots),
    )
    for op, size, last in cases:
        y, after = compiled(op, implementation)(x[:size], weight, pool, 0, last)
        expected, after_flat = compiled(op, "xla")(flat[:size], flat_weight, pool, 0, last)
        assert y.shape == (size, 2, CHANNELS)
        assert_close("y", y.reshape(size, 12), expected, 1e-6)
        np.testing.assert_array_equal(after, after_flat)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_go_into_an_array_of_several(implementation: str) -> None:
    """Two layers behind one another: each leaves the other's rows alone, the first finds none."""
    x = [jnp.asarray(rows(9)) for _ in range(2)]
    pool = jnp.full((3, 2, SIZE - 1, CHANNELS), jnp.nan, jnp.float32)
    segments = Segments(*(jnp.array(y, jnp.int32) for y in ([0, 5, 7], [NO_SLOT] * 2, [0, 1])))
    one = compiled(ragged_causal_conv1d, implementation)

    @functools.partial(jax.jit, static_argnames="size")
    def into(x: Any, pool: Any, layer: Any, others: Any, size: int) -> Any:
        part = Part(size, layer * 9, others)
        how: Any = {"implementation": implementation, "interpret": implementation == "pallas"}
        return ragged_causal_conv1d(x, jnp.asarray(WEIGHT), pool, layer, segments, into=part, **how)

    y, after = into(x[1], pool, jnp.int32(1), None, size=18)
    y, after = into(x[0], after, jnp.int32(0), y, size=18)
    for layer in range(2):
        expected, pool = one(x[layer], WEIGHT, pool, layer, segments)
        np.testing.assert_array_equal(y[layer * 9 : layer * 9 + 9], expected)
    np.testing.assert_array_equal(after, pool)


def test_dense_takes_the_first_channels_of_heads() -> None:
    x = jnp.asarray(rng.standard_normal((1, 9, 2, 8)), jnp.float32)
    weight = jnp.asarray(np.stack([WEIGHT, WEIGHT[::-1]]))
    y = dense_causal_conv1d(x, weight)
    flat = x[..., :CHANNELS].reshape(1, 9, 12)
    expected = dense_causal_conv1d(flat, weight.reshape(12, SIZE))
    np.testing.assert_array_equal(y.reshape(1, 9, 12), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_lowers_for_cuda(dtype: Any) -> None:
    """Qwen3.5-4B, OLMo-Hybrid, Kimi-Linear; and no heads."""
    for shape, beside, taps in (
        ((16, 512), 256, 4),
        ((30, 384), 192, 4),
        ((32, 384), 0, 4),
        ((96,), 0, 3),
    ):
        weight = jax.ShapeDtypeStruct((*shape, taps), dtype)
        pool = jax.ShapeDtypeStruct((9, 2, taps - 1, math.prod(shape)), dtype)
        layer = jax.ShapeDtypeStruct((), jnp.int32)
        for op, tokens, last in (
            (ragged_causal_conv1d, 1000, segments_shape(4)),
            (decode_causal_conv1d, 33, jax.ShapeDtypeStruct((33,), jnp.int32)),
        ):
            x = jax.ShapeDtypeStruct((tokens, *shape[:-1], shape[-1] + beside), dtype)
            op = functools.partial(op, implementation="pallas")
            assert lower_for_cuda(op, x, weight, pool, layer, last).count(TRITON_CALL) == 1


def test_other_types_are_refused_by_name() -> None:
    x, pool = np.zeros((1, 4), np.float16), jnp.zeros((1, 1, 3, 4), jnp.float16)
    slots = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="x is float16"):
        decode_causal_conv1d(
            jnp.asarray(x), jnp.zeros((4, 4)), pool, 0, slots, implementation="pallas"
        )
