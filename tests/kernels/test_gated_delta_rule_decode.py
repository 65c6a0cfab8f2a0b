"""The decode kernel alone: drift, slots, cuts, and how it reads states."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NO_SLOT, decode_gated_delta_rule
from pallas_kernels.arg_specs import HEAD_SHAPES
from pallas_kernels.gated_delta_rule.decode import DecodeTuning, decode

from ..assertions import assert_close
from . import oracle
from .lowering import equations
from .test_gated_delta_rule import ACTIVATION, F32_BOUND, Case, inputs, packed, state_of


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_long_decode_drifts_no_faster_than_the_reference(per_channel: bool) -> None:
    """8,192 steps; states decay little, so that errors stay in them."""
    case = Case("drift", 1, 1, 16, 16, per_channel=per_channel, decay="none")
    steps = 8192
    x = inputs(case, steps)
    x = (*x[:3], np.full_like(x[3], -1e-3), x[4])
    _, expected = oracle.gated_delta_rule(*x)
    qkv, gates = packed(x)
    errors = {}
    for implementation in ("xla", "pallas"):
        step = functools.partial(
            decode_gated_delta_rule,
            activation=ACTIVATION,
            implementation=implementation,
            interpret=implementation == "pallas",
        )

        def one(pool: Any, token: Any, step: Any = step) -> Any:
            qkv, z, beta = token
            given = gates._replace(decay=z[None], beta=beta[None])
            return step(qkv[None], given, pool, 0, jnp.zeros(1, jnp.int32))[1], None

        pool = jnp.zeros((2, 1, 1, 16, 16))
        run = jax.jit(lambda pool, tokens, one=one: jax.lax.scan(one, pool, tokens)[0])
        state = run(pool, (qkv, gates.decay, gates.beta))[0, 0]
        error = np.linalg.norm(np.asarray(state, np.float64) - expected)
        errors[implementation] = error / np.linalg.norm(expected)
    assert errors["pallas"] <= max(1.5 * errors["xla"], 1e-6)
    assert errors["pallas"] < F32_BOUND


@pytest.mark.parametrize("shape", [(64, 64), (96, 192), (192, 96), (256, 256)])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("block", [32, 64])
def test_decode_touches_its_slots_alone(
    shape: tuple[int, int], per_channel: bool, block: int
) -> None:
    """One program a head or several; whatever belongs to no sequence is NaN, and stays so."""
    case = Case("decode", 1, 2, *shape, per_channel=per_channel)
    start = state_of(case)
    x = inputs(case, 1)
    qkv, gates = packed(x)
    poison = [jnp.concatenate([y, y * jnp.nan]) for y in (qkv, gates.decay, gates.beta)]
    gates = gates._replace(decay=poison[1], beta=poison[2])
    pool = jnp.full((3, 2, *start.shape), jnp.nan).at[1, 1].set(start)
    o, after = decode(
        poison[0], gates, pool, 1, jnp.array([1, NO_SLOT], jnp.int32), ACTIVATION,
        tuning=DecodeTuning(value_block=block), interpret=True,
    )  # fmt: skip
    expected, state = oracle.gated_delta_rule(*x, start)
    assert_close("o", o[:1], expected, F32_BOUND)
    assert_close("state", after[1, 1], state, F32_BOUND)
    assert (np.asarray(o[1]) == 0).all()
    assert np.isnan(np.asarray(after.at[1, 1].set(jnp.nan))).all()


@pytest.mark.parametrize(
    ("batch", "shape", "block"),
    [(1, (32, 128, 128), 16), (8, (32, 128, 128), 64), (8, (32, 128, 64), 32),
     (9, (32, 128, 64), 64), (128, (16, 256, 256), 32)],
)  # fmt: skip
def test_decode_is_cut_for_two_programs_a_multiprocessor(
    batch: int, shape: tuple[int, int, int], block: int
) -> None:
    assert DecodeTuning.default(batch, *shape).value_block == block


@pytest.mark.parametrize("batch", [1, 8, 128])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_decode_reads_states_and_nothing_else_past_l1(batch: int, per_channel: bool) -> None:
    shape = HEAD_SHAPES["kda-32x32x128" if per_channel else "gdn-16x32x128"]
    tuning = DecodeTuning.default(batch, shape.heads, shape.key_dim, shape.value_dim)
    layer, slots = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((), (batch,)))
    step = functools.partial(decode_gated_delta_rule, implementation="pallas")
    args = (*shape.inputs(batch, jnp.bfloat16), shape.pool(batch + 1, 2), layer, slots)
    loads = [e for e in equations(step, *args) if "is_volatile" in e.params]
    shapes = [e.outvars[0].aval.shape for e in loads if e.params["is_volatile"]]
    assert shapes == [(shape.key_dim, tuning.value_block)]
