"""A prefill of up to 32 tokens: one kernel, against the float64 oracle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import CONTINUE, NO_SLOT, Segments, ragged_gated_delta_rule
from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape, segments_shape
from pallas_kernels.gated_delta_rule.short_prefill import short_prefill
from pallas_kernels.gated_delta_rule.short_tile import ShortTuning

from ..assertions import assert_close
from . import oracle
from .lowering import TRITON_CALL, lower_for_cuda
from .test_gated_delta_rule import (
    ACTIVATION,
    BF16_BOUND,
    CASES,
    F32_BOUND,
    Case,
    each,
    inputs,
    packed,
    poisoned_pool,
    ragged,
    rounded,
    state_of,
)

# Sequences of 9 (which leaves a state at 4), 1, 0 and 17 tokens, and 3 rows of padding.
STARTS, END_SLOTS = (0, 9, 10, 10, 27), (1, 2, 5, 3)
CU = (0, 4, 9, 10, 10, 27, 27)
LOAD = (6, CONTINUE, NO_SLOT, 4, 6, NO_SLOT)
STORE = (0, 1, 2, 5, 3, NO_SLOT)
CASES_OF_KERNEL = (
    *CASES,
    Case("gdn-96-48", key_dim=96, value_dim=48),
    Case("kda-48-16", heads=2, key_dim=48, value_dim=16, per_channel=True),
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", CASES_OF_KERNEL, ids=[case.name for case in CASES_OF_KERNEL])
def test_sequences_side_by_side_equal_each_alone(case: Case, dtype: Any) -> None:
    x = rounded(inputs(case, 30), dtype)
    pool = poisoned_pool(case, slots=7)
    pool[6, 1], pool[4, 1] = state_of(case), state_of(case, 2)
    segments = Segments(*(jnp.asarray(np.array(y, np.int32)) for y in (CU, LOAD, STORE)))
    o, after = ragged["pallas"](*packed(x, dtype), pool, layer=1, segments=segments)
    assert o.dtype == dtype
    o, after = np.asarray(o.astype(jnp.float32)), np.asarray(after)

    bound = max(case.bound, F32_BOUND if dtype == jnp.float32 else BF16_BOUND)
    begin = (state_of(case), None, state_of(case, 2), state_of(case))
    for n, slot in enumerate(END_SLOTS):
        part = each(lambda y, n=n: y[STARTS[n] : STARTS[n + 1]], x)
        expected, state = oracle.gated_delta_rule(*part, begin[n])
        if len(expected):
            assert_close(f"o of {n}", o[STARTS[n] : STARTS[n + 1]], expected, bound)
        assert_close(f"state of {n}", after[slot, 1], state, bound)
    _, state = oracle.gated_delta_rule(*each(lambda y: y[:4], x), begin[0])
    assert_close("state at 4", after[0, 1], state, bound)
    np.testing.assert_array_equal(after[[4, 6]], pool[[4, 6]])  # sources are only read
    assert np.isnan(after[:, 0]).all()  # the other layer is untouched
    np.testing.assert_array_equal(o[27:], 0)


def alone(case: Case, x: Any, dtype: Any, tuning: ShortTuning | None = None) -> tuple[Any, Any]:
    """(o, state) of one sequence from slot 0, whose state goes to slot 1; all of layer 1."""
    pool = poisoned_pool(case, slots=2)
    pool[0, 1] = state_of(case)
    qkv, gates = packed(x, dtype)
    gates = gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])
    segments = Segments(*(jnp.array(y, jnp.int32) for y in ([0, len(x[0])], [0], [1])))
    o, after = short_prefill(
        qkv, gates, jnp.asarray(pool), jnp.ones(1, jnp.int32), None, segments, ACTIVATION,
        tuning=tuning, interpret=True,
    )  # fmt: skip
    return o.astype(jnp.float32), after[1, 1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("tile", [16, 32])
def test_tiles_of_a_sequence_continue_each_other(tile: int, per_channel: bool, dtype: Any) -> None:
    """Two tiles, or one; keys in two blocks."""
    case = Case("cut", 1, 2, 48, 32, per_channel=per_channel)
    x = rounded(inputs(case, 29), dtype)
    o, state = alone(case, x, dtype, ShortTuning(tile=tile))
    expected, expected_state = oracle.gated_delta_rule(*x, state_of(case))
    bound = F32_BOUND if dtype == jnp.float32 else BF16_BOUND
    assert_close("o", o, expected, bound)
    assert_close("state", state, expected_state, bound)


@pytest.mark.parametrize("decay", ["mixed", "strong"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_a_chain_leaves_states_within_and_between_tiles(per_channel: bool, decay: str) -> None:
    """Of 32 tokens, with a segment of one tile, of a part of one, of two and an empty one."""
    case = Case("chain", 1, 2, 32, 32, per_channel=per_channel, decay=decay)
    x, ends = rounded(inputs(case, 32), jnp.bfloat16), (3, 13, 13, 32)
    pool = poisoned_pool(case, slots=5)
    pool[4, 1] = state_of(case)
    segments = Segments(
        *(jnp.array(y, jnp.int32) for y in ((0, *ends), (4, *(CONTINUE,) * 3), (0, 1, 2, 3)))
    )
    o, after = ragged["pallas"](*packed(x, jnp.bfloat16), pool, layer=1, segments=segments)
    expected, _ = oracle.gated_delta_rule(*x, state_of(case))
    assert_close("o", o.astype(jnp.float32), expected, BF16_BOUND)
    for slot, end in enumerate(ends):
        _, state = oracle.gated_delta_rule(*each(lambda y, end=end: y[:end], x), state_of(case))
        assert_close(f"state at {end}", after[slot, 1], state, BF16_BOUND)


@pytest.mark.parametrize("size", [1e-18, 1e18], ids=["small", "large"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_values_of_any_size(per_channel: bool, size: float) -> None:
    case = Case("size", 1, 1, 32, 16, per_channel=per_channel)
    q, k, v, g, beta = inputs(case, 32)
    x = rounded((q, k, v * np.float32(size), g, beta), jnp.bfloat16)
    o, state = alone(case, x, jnp.bfloat16)
    expected, expected_state = oracle.gated_delta_rule(*x, state_of(case))
    assert_close("o", o, expected, BF16_BOUND)
    assert_close("state", state, expected_state, BF16_BOUND)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=list(HEAD_SHAPES))
def test_lowers_for_cuda_as_one_kernel(shape: HeadShape, dtype: Any) -> None:
    op = functools.partial(ragged_gated_delta_rule, implementation="pallas")
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    args = (*shape.inputs(32, dtype), shape.pool(9, 2), layer, segments_shape(4))
    assert lower_for_cuda(op, *args).count(TRITON_CALL) == 1
