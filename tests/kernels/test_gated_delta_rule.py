"""Chunked, ragged and decode forms of the gated delta rule against the float64 oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels import (
    CONTINUE,
    NO_SLOT,
    Activation,
    Gates,
    Segments,
    chunk_gated_delta_rule,
    decode_gated_delta_rule,
    ragged_gated_delta_rule,
    recurrent_gated_delta_rule,
)

from ..assertions import assert_close
from . import oracle

F32_BOUND = 1e-5  # relative RMS
BF16_BOUND = 5e-3


@dataclass(frozen=True)
class Case:
    name: str
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    per_channel: bool = False
    decay: str = "mixed"
    beta: float | None = None
    keys: str = "random"
    bound: float = F32_BOUND


CASES = (
    Case("gdn"),
    Case("gdn-no-group", key_heads=3, heads=3, key_dim=48, value_dim=16),
    Case("kda", key_heads=2, heads=2, per_channel=True),
    Case("gdn-strong-decay", decay="strong"),
    Case("kda-strong-decay", key_heads=2, heads=2, per_channel=True, decay="strong"),
    Case("kda-some-channels", key_heads=2, heads=2, per_channel=True, decay="half"),
    Case("gdn-no-decay", decay="none"),
    Case("gdn-beta-0", beta=0.0),
    Case("gdn-beta-1-same-keys", decay="none", beta=1.0, keys="same"),
    # Every token reflects the state: the recurrence itself errs by 2e-5 in float32.
    Case(
        "kda-beta-2-same-keys",
        key_heads=2,
        heads=2,
        per_channel=True,
        decay="none",
        beta=2.0,
        keys="same",
        bound=1e-4,
    ),
    Case("gdn-zero-keys", keys="zero"),
)
IDS = [case.name for case in CASES]


Five = tuple[Any, Any, Any, Any, Any]  # q, k, v, g, beta
ACTIVATION = Activation(beta_scale=2.0)


def each(change: Callable[[Any], Any], x: Five) -> Five:
    q, k, v, g, beta = map(change, x)
    return q, k, v, g, beta


def logits_of(g: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 logits of gates under ACTIVATION with A_log = dt_bias = 0; -200 and 200 saturate."""
    g, beta = (np.asarray(x, np.float64) for x in (g, beta))
    with np.errstate(divide="ignore"):
        z = np.where(g < -30, -g, np.log(np.expm1(np.minimum(-g, 30))))
        strength = np.log(beta / 2) - np.log1p(-beta / 2)
    return tuple(np.clip(x, -200, 200).astype(np.float32) for x in (z, strength))  # type: ignore


def gates_of(z: np.ndarray, strength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What float32 logits stand for, in float64."""
    z, strength = z.astype(np.float64), strength.astype(np.float64)
    return -np.logaddexp(z, 0), 2 / (1 + np.exp(-strength))


def packed(x: Five, dtype: Any = jnp.float32) -> tuple[Array, Gates]:
    """As an op gets them: q, k and v in one array of the model's type, gates as logits."""
    q, k, v, g, beta = x
    values = np.reshape(v, (len(v), k.shape[1], -1))
    qkv = jnp.asarray(np.concatenate([q, k, values], axis=2), dtype)
    z, strength = logits_of(g, beta)
    zeros = jnp.zeros(z.shape[1:])
    return qkv, Gates(jnp.asarray(z), jnp.asarray(strength), jnp.zeros(z.shape[1]), zeros)


def rounded(x: Five, dtype: Any) -> Five:
    """The values that remain in the model's type."""
    q, k, v, g, beta = x
    q, k, v = (np.asarray(jnp.asarray(y, dtype).astype(jnp.float32)) for y in (q, k, v))
    return q, k, v, g, beta


def inputs(case: Case, length: int, seed: int = 0) -> Five:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((length, case.key_heads, case.key_dim))
    k = rng.standard_normal((length, case.key_heads, case.key_dim))
    if case.keys == "same":
        k[:] = k[:1]
    elif case.keys == "zero":
        k[:] = 0
    v = rng.standard_normal((length, case.heads, case.value_dim))
    shape = (length, case.heads, case.key_dim) if case.per_channel else (length, case.heads)
    g = {
        "mixed": -np.exp(rng.uniform(-7, 1, shape)),
        "strong": -rng.uniform(0, 20, shape),
        "none": np.zeros(shape),
        "half": np.where(rng.random(shape) < 0.5, -20.0, -0.01),
    }[case.decay]
    beta = rng.random((length, case.heads)) if case.beta is None else None
    if beta is None:
        beta = np.full((length, case.heads), case.beta)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    return q, k, v, *gates_of(*logits_of(g, beta))


def state_of(case: Case, seed: int = 1) -> np.ndarray:
    shape = (case.heads, case.key_dim, case.value_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    compiled = jax.jit(op)
    return lambda *x: compiled(*(jnp.asarray(y, jnp.float32) for y in x))


chunk = on_float32(chunk_gated_delta_rule)
recurrent = on_float32(recurrent_gated_delta_rule)


def compiled(op: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """The op in one implementation; kernels are interpreted."""
    options: dict[str, Any] = {"implementation": implementation, "activation": ACTIVATION}
    options["interpret"] = implementation == "pallas"
    return jax.jit(functools.partial(op, **options), static_argnames="layer")


IMPLEMENTATIONS = ("xla", "pallas")
ragged = {name: compiled(ragged_gated_delta_rule, name) for name in IMPLEMENTATIONS}
decode = {name: compiled(decode_gated_delta_rule, name) for name in IMPLEMENTATIONS}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_chunk_and_recurrent_equal_oracle(case: Case) -> None:
    x, start = inputs(case, 130), state_of(case)
    o, state = oracle.gated_delta_rule(*x, start)
    for name, op in (("chunk", chunk), ("recurrent", recurrent)):
        got_o, got_state = op(*x, start)
        assert_close(f"{name} o", got_o, o, case.bound)
        assert_close(f"{name} state", got_state, state, case.bound)


@pytest.mark.parametrize("length", [1, 17, 64, 127, 1000])
@pytest.mark.parametrize("case", CASES[::2][:2], ids=IDS[::2][:2])
def test_chunk_of_any_length(case: Case, length: int) -> None:
    x = inputs(case, length)
    o, state = oracle.gated_delta_rule(*x)
    got_o, got_state = chunk(*x)
    assert_close("o", got_o, o, F32_BOUND)
    assert_close("state", got_state, state, F32_BOUND)


def poisoned_pool(case: Case, slots: int, layers: int = 2) -> np.ndarray:
    shape = (slots, layers, case.heads, case.key_dim, case.value_dim)
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize(
    "implementation, dtype",
    [("xla", jnp.float32), ("pallas", jnp.float32), ("pallas", jnp.bfloat16)],
    ids=["xla-f32", "pallas-f32", "pallas-bf16"],
)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ragged_batch_equals_each_sequence_alone(
    case: Case, implementation: str, dtype: Any
) -> None:
    """Packed sequences, one empty, one cut at interior depths; unwritten slots hold NaN."""
    bound = case.bound if dtype == jnp.float32 else BF16_BOUND
    lengths = (70, 1, 0, 64, 33)
    starts = np.cumsum((0, *lengths))
    given = inputs(case, 192)  # 24 rows of padding behind the last sequence
    x = rounded(given, dtype)
    pool = poisoned_pool(case, slots=9)
    pool[5, 1], pool[6, 1] = state_of(case), state_of(case, 2)
    # sequence 0 leaves states at 20 and 64; sequence 2 passes its state through
    cu = np.array([0, 20, 64, 70, 71, 71, 135, 168, 168], np.int32)
    load = np.array([5, CONTINUE, CONTINUE, NO_SLOT, 6, NO_SLOT, 5, NO_SLOT], np.int32)
    store = np.array([0, 1, 2, 3, 4, 7, NO_SLOT, NO_SLOT], np.int32)
    segments = Segments(*map(jnp.asarray, (cu, load, store)))
    o, after = ragged[implementation](*packed(x, dtype), pool, layer=1, segments=segments)
    assert o.dtype == dtype
    o, after = np.asarray(o.astype(jnp.float32)), np.asarray(after)

    begin = (state_of(case), None, state_of(case, 2), None, state_of(case))
    end_slot = (2, 3, 4, 7, None)
    for n, length in enumerate(lengths):
        part = each(lambda y, n=n, size=length: y[starts[n] : starts[n] + size], x)
        expected, state = oracle.gated_delta_rule(*part, begin[n])
        if length:
            assert_close(f"o of {n}", o[starts[n] : starts[n + 1]], expected, bound)
        if end_slot[n] is not None:
            assert_close(f"state of {n}", after[end_slot[n], 1], state, bound)
    for depth, slot in ((20, 0), (64, 1)):
        begun = each(lambda y, depth=depth: y[:depth], x)
        _, state = oracle.gated_delta_rule(*begun, begin[0])
        assert_close(f"state at {depth}", after[slot, 1], state, bound)
    np.testing.assert_array_equal(after[5], pool[5])  # sources are only read
    assert np.isnan(after[:, 0]).all()  # the other layer is untouched
    assert np.isfinite(o).all()  # rows of padding too


@pytest.mark.parametrize("case", CASES[::2][:2], ids=IDS[::2][:2])
def test_split_anywhere_is_whole(case: Case) -> None:
    x, start = inputs(case, 100), state_of(case)
    whole_o, whole_state = chunk(*x, start)
    for cut in (1, 36, 64):  # of two of them the parts have the same lengths
        first_o, state = chunk(*(y[:cut] for y in x), start)
        second_o, state = chunk(*(y[cut:] for y in x), state)
        assert_close("o", np.concatenate([first_o, second_o]), whole_o, 1e-6)
        assert_close("state", state, whole_state, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_decode_updates_slots_in_place(case: Case, implementation: str) -> None:
    tokens = inputs(case, 3)
    pool = poisoned_pool(case, slots=6)
    states = {4: state_of(case), 1: state_of(case, 2)}
    for slot, state in states.items():
        pool[slot, 1] = state
    slots = jnp.array([4, NO_SLOT, 1], jnp.int32)
    o, after = decode[implementation](*packed(tokens), pool, layer=1, slots=slots)
    for row, slot in ((0, 4), (2, 1)):
        part = each(lambda y, row=row: y[row : row + 1], tokens)
        expected, state = oracle.gated_delta_rule(*part, states[slot])
        assert_close("o", o[row], expected[0], F32_BOUND)
        assert_close("state", after[slot, 1], state, F32_BOUND)
    untouched = [0, 2, 3, 5]
    assert np.isnan(np.asarray(after)[untouched]).all()
    assert np.isfinite(np.asarray(o)).all()


def test_long_decode_drifts_no_faster_than_rounding() -> None:
    """Relative state error over 2,048 tokens stays within sqrt growth of that at 128."""
    case = Case("drift", key_heads=1, heads=2, key_dim=8, value_dim=8)
    x = inputs(case, 2048)
    errors = {}
    for length in (128, 2048):
        part: Any = tuple(y[:length] for y in x)
        _, expected = oracle.gated_delta_rule(*part)
        _, state = recurrent(*part)
        errors[length] = np.abs(np.asarray(state) - expected).max() / np.abs(expected).max()
    assert errors[2048] <= max(errors[128], 1e-7) * (2048 / 128) ** 0.5


def test_gradients_are_finite_under_strong_decay() -> None:
    case = Case("grad", per_channel=True, key_heads=2, heads=2, decay="strong")
    x = inputs(case, 70)
    x = each(lambda y: jnp.asarray(y, jnp.float32), x)
    gradients = jax.grad(lambda *y: chunk_gated_delta_rule(*y)[0].sum(), argnums=range(5))
    for grad in jax.jit(gradients)(*x):
        assert np.isfinite(np.asarray(grad)).all()
