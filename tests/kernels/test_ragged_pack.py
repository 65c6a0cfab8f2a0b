"""Packing rows of states against plain numpy indexing; unwritten slots hold NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PackedStates, pack_states, row_positions, unpack_states
from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape

from .lowering import TRITON_CALL, lower_for_cuda

LAYERS, HEADS, KEYS = 2, 3, 8
COUNT = LAYERS * HEADS * KEYS
SLOTS, PACKED_SLOTS = 6, 5
SOURCE, TARGET = np.array([4, -1, 1, 2], np.int32), np.array([0, 2, 3, -1], np.int32)
MOVED = ((4, 0), (1, 3))

HEAD_ROWS = np.concatenate([np.arange(8, 16), np.arange(32, 48)])
ROWS = {
    "heads": HEAD_ROWS,
    "channels": np.array([0, 3, 4, 11, 12, 13, 30, 47]),
    "unsorted": np.array([40, 2, 17]),
    "padded": np.concatenate([HEAD_ROWS, np.full(9, -1), [7], [-1]]),
    "all": np.arange(COUNT),
    "only_padding": np.full(3, -1),
    "none": np.zeros(0),
}
WIDTHS = [*((name, 48) for name in ROWS), ("padded", 32)]
IMPLEMENTATIONS = ("xla", "pallas")


@functools.cache
def compiled(op: Callable[..., Any], implementation: str, **options: Any) -> Callable[..., Any]:
    options |= {"implementation": implementation, "interpret": implementation == "pallas"}
    return jax.jit(functools.partial(op, **options))


def states(slots: int = SLOTS, width: int = 32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((slots, LAYERS, HEADS, KEYS, width)).astype(np.float32)
    return x * np.exp(rng.uniform(-9, 9, x.shape[:-1])).astype(np.float32)[..., None]


def poisoned(rows: np.ndarray, width: int, int8: bool) -> PackedStates:
    shape = (PACKED_SLOTS, len(rows), width)
    if int8:
        scales = jnp.full(shape[:2], jnp.nan, jnp.float32)
        return PackedStates(jnp.full(shape, 77, jnp.int8), scales)
    return PackedStates(jnp.full(shape, jnp.nan, jnp.float32), None)


def kept_of(state: np.ndarray, rows: np.ndarray) -> np.ndarray:
    flat = state.reshape(COUNT, -1)
    return np.where((rows >= 0)[:, None], flat[np.maximum(rows, 0)], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name, width", WIDTHS)
def test_pack_copies_rows_in_float32(name: str, width: int, implementation: str) -> None:
    rows, pool = ROWS[name].astype(np.int32), states(width=width)
    op = compiled(pack_states, implementation)
    packed = op(pool, poisoned(rows, width, int8=False), rows, SOURCE, TARGET)
    values = np.asarray(packed.values)
    for source, target in MOVED:
        np.testing.assert_array_equal(values[target], kept_of(pool[source], rows))
    assert np.isnan(values[[1, 2, 4]]).all()  # entries with a negative slot do nothing
    assert packed.scales is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name, width", WIDTHS)
def test_int8_errs_by_half_a_step(name: str, width: int, implementation: str) -> None:
    rows, pool = ROWS[name].astype(np.int32), states(width=width)
    pool[4, 0, 1, 3] = 0.0  # a row of zeros, among the kept ones
    pool[4, 0, 1, 4] = np.float32(1e-30) * np.arange(width)  # nearly one
    op = compiled(pack_states, implementation)
    packed = op(pool, poisoned(rows, width, int8=True), rows, SOURCE, TARGET)
    values, scales = (np.asarray(x) for x in packed)
    assert values.dtype == np.int8
    for source, target in MOVED:
        kept = kept_of(pool[source], rows).astype(np.float64)
        np.testing.assert_allclose(scales[target], np.abs(kept).max(-1) / 127, rtol=1e-6)
        error = np.abs(values[target] * scales[target][:, None].astype(np.float64) - kept)
        assert (error <= 0.50001 * scales[target][:, None]).all()
    assert (values[[1, 2, 4]] == 77).all() and np.isnan(scales[[1, 2, 4]]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name, int8, given",
    [*((name, int8, False) for name in ROWS for int8 in (False, True)), ("padded", False, True)],
)
def test_unpack_restores_kept_rows(name: str, int8: bool, given: bool, implementation: str) -> None:
    """Into slots that hold NaN: omitted rows are zeroed. Into others: they stay."""
    rows, width = ROWS[name].astype(np.int32), 48
    rng = np.random.default_rng(1)
    shape = (PACKED_SLOTS, len(rows), width)
    if int8:
        scales = rng.random(shape[:2], np.float32)
        scales[0, :1] = 0.0
        values = rng.integers(-127, 128, shape).astype(np.int8)
        packed = PackedStates(jnp.asarray(values), jnp.asarray(scales))
        wide = values * scales[..., None]
    else:
        wide = rng.standard_normal(shape).astype(np.float32)
        wide[[1, 2, 3]] = np.nan  # not read
        packed = PackedStates(jnp.asarray(wide), None)
    source, target = TARGET, SOURCE  # the way back
    source = np.where(source == 3, 4, source)
    moved = ((0, 4), (4, 1))
    positions = row_positions(jnp.asarray(rows), COUNT) if given else None
    kept = rows[rows >= 0]
    for omitted in ("zero", "keep"):
        pool = np.full((SLOTS, LAYERS, HEADS, KEYS, width), np.nan, np.float32)
        if omitted == "keep":
            pool = states(width=width)
        op = compiled(unpack_states, implementation, omitted=omitted)
        after = np.asarray(op(packed, pool, rows, source, target, positions=positions))
        for at, slot in moved:
            expected = np.zeros((COUNT, width), np.float32)
            if omitted == "keep":
                expected = pool[slot].reshape(COUNT, width).copy()
            expected[kept] = wide[at][rows >= 0]
            np.testing.assert_array_equal(after[slot].reshape(COUNT, width), expected)
        untouched = [0, 2, 3, 5]
        np.testing.assert_array_equal(after[untouched], pool[untouched])


@pytest.mark.parametrize("int8", [False, True], ids=["f32", "int8"])
def test_mismatched_pools_are_refused(int8: bool) -> None:
    rows = jnp.arange(3, dtype=jnp.int32)
    packed = poisoned(np.arange(4), 32, int8)
    with pytest.raises(ValueError, match=r"packed.values is \(5, 4, 32\); expected .*\(5, 3, 32\)"):
        pack_states(jnp.asarray(states()), packed, rows, jnp.asarray(SOURCE), jnp.asarray(TARGET))
    wrong = PackedStates(packed.values[:, :3], None if int8 else jnp.zeros((5, 3)))
    with pytest.raises(ValueError, match="expected float32 with none or int8 with"):
        pack_states(jnp.asarray(states()), wrong, rows, jnp.asarray(SOURCE), jnp.asarray(TARGET))


@pytest.mark.parametrize("int8", [False, True], ids=["f32", "int8"])
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=list(HEAD_SHAPES))
def test_lowers_for_cuda(shape: HeadShape, int8: bool) -> None:
    pool, kept = shape.pool(9, layers=20), 10_001
    values = jax.ShapeDtypeStruct((7, kept, shape.value_dim), jnp.int8 if int8 else jnp.float32)
    scales = jax.ShapeDtypeStruct((7, kept), jnp.float32) if int8 else None
    packed: Any = PackedStates(values, scales)  # pyright: ignore[reportArgumentType]
    rows, slots = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (kept, 8))
    for op, first in (
        (pack_states, (pool, packed)),
        (functools.partial(unpack_states, omitted="zero"), (packed, pool)),
        (functools.partial(unpack_states, omitted="keep"), (packed, pool)),
    ):
        op = functools.partial(op, implementation="pallas")
        assert lower_for_cuda(op, *first, rows, slots, slots).count(TRITON_CALL) == 1
