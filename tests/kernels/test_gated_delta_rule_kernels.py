"""The Pallas kernels alone: lengths, tunings, determinism, and lowering for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    NO_SLOT,
    Gates,
    Segments,
    decode_gated_delta_rule,
    ragged_gated_delta_rule,
)
from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape, segments_shape
from pallas_kernels.gated_delta_rule.head_products import sums_of
from pallas_kernels.gated_delta_rule.prefill import ragged_prefill
from pallas_kernels.gated_delta_rule.tile import log2_softplus
from pallas_kernels.gated_delta_rule.tuning import PrefillTuning

from ..assertions import assert_close
from . import oracle
from .lowering import TRITON_CALL, lower_for_cuda
from .test_gated_delta_rule import (
    ACTIVATION,
    BF16_BOUND,
    F32_BOUND,
    Case,
    each,
    inputs,
    packed,
    rounded,
    state_of,
)

GDN = Case("gdn", key_heads=1, heads=2, key_dim=32, value_dim=32)
KDA = Case("kda", key_heads=1, heads=1, per_channel=True, key_dim=32)
BF16, KDA_BF16 = (PrefillTuning.default(jnp.bfloat16, channels, 64) for channels in (False, True))
MANY = PrefillTuning.default(jnp.bfloat16, False, 1 << 16)


@functools.cache
def compiled(tuning: PrefillTuning | None) -> Callable[..., Any]:
    """(qkv, gates, pool, segments) -> (o, pool)"""

    def run(qkv: Any, gates: Gates, pool: Any, segments: Segments) -> Any:
        gates = gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])
        layers = jnp.zeros_like(segments.load)
        return ragged_prefill(
            qkv, gates, pool, layers, None, segments, ACTIVATION, tuning=tuning, interpret=True
        )

    return jax.jit(run)


def prefill(case: Case, length: int, dtype: Any, tuning: PrefillTuning | None = None) -> Any:
    """(o, state, expected o, expected state) of one sequence from slot 0 to slot 1."""
    x = rounded(inputs(case, 150), dtype)  # one shape, whatever the length
    start = state_of(case)
    pool = np.full((3, 1, *start.shape), np.nan, np.float32)
    pool[0, 0] = start
    segments = Segments(*(jnp.array(y, jnp.int32) for y in ([0, length], [0], [1])))
    o, after = compiled(tuning)(*packed(x, dtype), pool, segments)
    expected = oracle.gated_delta_rule(*each(lambda y: y[:length], x), start)
    return o[:length].astype(jnp.float32), after[1, 0], *expected


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 150])
@pytest.mark.parametrize("case", [GDN, KDA], ids=["gdn", "kda"])
def test_any_length(case: Case, length: int) -> None:
    o, state, expected, expected_state = prefill(case, length, jnp.float32)
    assert_close("o", o, expected, F32_BOUND)
    assert_close("state", state, expected_state, F32_BOUND)


@pytest.mark.parametrize(
    "case, tuning",
    [
        (GDN, replace(BF16, transposed=True)),
        (GDN, replace(BF16, value_block=16)),
        (replace(GDN, value_dim=64), MANY),
        (KDA, replace(KDA_BF16, transposed=True, turn_by_product=True, value_block=64)),
        (replace(GDN, key_dim=96, value_dim=48), BF16),  # blocks of 64 and 32
        (KDA, replace(KDA_BF16, transposed=False, key_block=16)),
        (KDA, replace(KDA_BF16, decay_leaf=1)),
        (replace(KDA, decay="strong"), replace(KDA_BF16, decay_leaf=8)),
    ],
)
def test_tunings_change_no_result(case: Case, tuning: PrefillTuning) -> None:
    o, state, expected, expected_state = prefill(case, 100, jnp.bfloat16, tuning)
    assert_close("o", o, expected, BF16_BOUND)
    assert_close("state", state, expected_state, BF16_BOUND)


@pytest.mark.parametrize("sequences, heads, block", [(1, 32, 32), (2, 32, 64), (1, 48, 64)])
def test_scans_of_few_columns_are_cut_finer(sequences: int, heads: int, block: int) -> None:
    """128 programs of 32 columns are at work at once on the 132 multiprocessors of an H200."""
    columns = sequences * heads * 128
    assert PrefillTuning.default(jnp.bfloat16, False, columns).value_block == block
    small = PrefillTuning.default(jnp.bfloat16, False, columns, multiprocessors=64)
    assert small.value_block == 64


@pytest.mark.parametrize(
    "decay, keys, beta",
    [
        ("none", "same", 2.0),
        ("none", "same", 1.0),
        ("half", "same", 1.0),
        ("strong", "random", None),
    ],
)
@pytest.mark.parametrize("case", [GDN, KDA], ids=["gdn", "kda"])
def test_bf16_holds_its_bound_on_hard_inputs(
    case: Case, decay: str, keys: str, beta: float | None
) -> None:
    """Repeated keys add up the roundings of a tile; reflected ones (beta 2) never forget them."""
    case = replace(case, decay="strong" if case is GDN and decay == "half" else decay)
    case = replace(case, keys=keys, beta=beta)
    o, state, expected, expected_state = prefill(case, 130, jnp.bfloat16)
    assert_close("o", o, expected, BF16_BOUND)
    assert_close("state", state, expected_state, BF16_BOUND)


def test_softplus_of_any_logit() -> None:
    x = np.concatenate([np.linspace(-90, 90, 4001), np.linspace(-9, -4, 501)]).astype(np.float32)
    found = np.asarray(log2_softplus(jnp.asarray(x), interpret=True), np.float64)
    expected = np.logaddexp(x.astype(np.float64), 0) / np.log(2)
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-30)


def test_fast_tokens_cost_sums_of_slow_ones_no_digit() -> None:
    """A plain sum of log-decays down to -600 would lose 4e-5 of every difference."""
    g = np.where(np.arange(64) % 3 == 0, -28.7, -np.geomspace(1e-5, 1.0, 64)).astype(np.float32)
    upto, whole = sums_of(jnp.asarray(g))
    exact = np.cumsum(g.astype(np.float64))
    lower = np.tril(np.ones((64, 64), bool))
    between = (upto.coarse[:, None] - upto.coarse) + (upto.fine[:, None] - upto.fine)
    expected = np.where(lower, exact[:, None] - exact, 0.0)
    found = np.where(lower, np.asarray(between, np.float64), 0.0)
    np.testing.assert_allclose(np.exp2(found), np.exp2(expected), rtol=0, atol=1e-7)
    to_end = np.exp2(np.asarray(whole - upto, np.float64))
    np.testing.assert_allclose(to_end, np.exp2(exact[-1] - exact), rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [1e-18, 1e18], ids=["small", "large"])
def test_values_of_any_size(size: float) -> None:
    """float16 tiles hold values in units of the largest."""
    case = GDN
    q, k, v, g, beta = inputs(case, 70)
    v = v * np.float32(size)
    x = rounded((q, k, v, g, beta), jnp.bfloat16)
    pool = jnp.zeros((2, 1, case.heads, case.key_dim, case.value_dim), jnp.float32)
    segments = Segments(*(jnp.array(y, jnp.int32) for y in ([0, 70], [NO_SLOT], [0])))
    o, after = compiled(None)(*packed(x, jnp.bfloat16), pool, segments)
    expected, state = oracle.gated_delta_rule(*x)
    assert_close("o", o.astype(jnp.float32), expected, BF16_BOUND)
    assert_close("state", after[0, 0], state, BF16_BOUND)


@pytest.mark.parametrize("case", [GDN, KDA], ids=["gdn", "kda"])
def test_runs_are_identical(case: Case) -> None:
    first, second = (prefill(case, 70, jnp.bfloat16)[:2] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dims", [(64, 128), (96, 192), (192, 96), (256, 64), (128, 256)])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_prefill_of_unequal_dims(dims: tuple[int, int], per_channel: bool) -> None:
    case = Case("dims", 1, 1, *dims, per_channel=per_channel)
    o, state, expected, expected_state = prefill(case, 70, jnp.float32)
    assert_close("o", o, expected, F32_BOUND)
    assert_close("state", state, expected_state, F32_BOUND)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=list(HEAD_SHAPES))
def test_lowers_for_cuda(shape: HeadShape, dtype: Any) -> None:
    ragged = functools.partial(ragged_gated_delta_rule, implementation="pallas")
    step = functools.partial(decode_gated_delta_rule, implementation="pallas")
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    args = (*shape.inputs(1000, dtype), shape.pool(9, 2), layer, segments_shape(4))
    for most in (None, 1):
        run = functools.partial(ragged, sequences=most)
        assert lower_for_cuda(run, *args).count(TRITON_CALL) == 3
    slots = jax.ShapeDtypeStruct((32,), jnp.int32)
    text = lower_for_cuda(step, *shape.inputs(32, dtype), shape.pool(33, 2), layer, slots)
    assert text.count(TRITON_CALL) == 1


def test_uncovered_shapes_are_refused_by_name() -> None:
    x = inputs(Case("odd", key_dim=24), 1)
    pool = jnp.zeros((2, 1, 4, 24, 32))
    slots = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="key dim 24"):
        decode_gated_delta_rule(*packed(x), pool, 0, slots, implementation="pallas")
    decode_gated_delta_rule(*packed(x), pool, 0, slots)  # XLA takes any
