"""States rebuilt from suffixes, layer by layer, against the op that also computes outputs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    CONTINUE,
    NO_SLOT,
    Gates,
    Segments,
    ragged_gated_delta_rule,
    suffix_replay,
)
from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape, segments_shape
from pallas_kernels.gated_delta_rule.inputs import unpack

from ..assertions import assert_close
from . import oracle
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
from .test_gated_delta_rule_kernels import lower_for_cuda

GDN = Case("gdn", key_heads=1, heads=2, key_dim=32, value_dim=32)
KDA = Case("kda", key_heads=1, heads=1, per_channel=True, key_dim=32)
LAYERS = 3
CU = np.array([0, 70, 90, 90, 121, 121], np.int32)
LAYER = np.array([2, 0, 1, 0, 0], np.int32)
LOAD = np.array([NO_SLOT, 4, 4, CONTINUE, NO_SLOT], np.int32)
STORE = np.array([0, NO_SLOT, 1, 2, NO_SLOT], np.int32)


@pytest.mark.parametrize(
    "implementation, dtype",
    [("xla", jnp.float32), ("pallas", jnp.float32), ("pallas", jnp.bfloat16)],
    ids=["xla-f32", "pallas-f32", "pallas-bf16"],
)
@pytest.mark.parametrize("case", [GDN, KDA], ids=["gdn", "kda"])
def test_states_of_several_layers(case: Case, implementation: Any, dtype: Any) -> None:
    """Each segment has the gates' parameters of its layer and ends in that layer of its slot."""
    x = rounded(inputs(case, 130), dtype)
    qkv, gates = packed(x, dtype)
    rng = np.random.default_rng(5)
    shape = (LAYERS, *gates.dt_bias.shape)
    gates = gates._replace(
        A_log=jnp.asarray(rng.uniform(-1, 1, (LAYERS, case.heads)), jnp.float32),
        dt_bias=jnp.asarray(rng.uniform(-1, 1, shape), jnp.float32),
    )
    qkv = qkv.at[:, :, : case.key_dim].set(jnp.nan)  # queries are not read
    start = state_of(case)
    pool = np.full((5, LAYERS, *start.shape), np.nan, np.float32)
    pool[4] = start
    segments = Segments(*map(jnp.asarray, (CU, LOAD, STORE)))
    # A segment may continue one of its own layer only: 3 continues 2, so both take layer 0.
    layers = jnp.asarray(np.where(LAYER == 1, 0, LAYER))
    run = jax.jit(
        functools.partial(
            suffix_replay,
            activation=ACTIVATION,
            implementation=implementation,
            interpret=implementation == "pallas",
        )
    )
    after = np.asarray(run(qkv, gates, pool, layers, segments))

    def expected(layer: int, begin: int, end: int, state: np.ndarray | None) -> np.ndarray:
        own = Gates(gates.decay, gates.beta, gates.A_log[layer], gates.dt_bias[layer])
        wide = jax.tree.map(lambda y: np.asarray(y, np.float64), own)
        *_, g, beta = map(np.asarray, unpack(qkv, wide, case.key_dim, ACTIVATION))
        q, k, v, *_ = each(lambda y: y[begin:end], x)
        return oracle.gated_delta_rule(q, k, v, g[begin:end], beta[begin:end], state)[1]

    bound = F32_BOUND if dtype == jnp.float32 else BF16_BOUND
    assert_close("from zero", after[0, 2], expected(2, 0, 70, None), bound)
    assert_close("passed through", after[1, 0], start, bound)
    assert_close("continued", after[2, 0], expected(0, 90, 121, start), bound)
    np.testing.assert_array_equal(after[4], pool[4])
    written = np.zeros(pool.shape[:2], bool)
    written[0, 2] = written[1, 0] = written[2, 0] = written[4] = True
    assert np.isnan(after[~written]).all()


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("case", [GDN, KDA], ids=["gdn", "kda"])
def test_outputs_of_several_layers_are_those_of_each(case: Case, implementation: Any) -> None:
    qkv, gates = packed(inputs(case, 130), jnp.float32)
    rng = np.random.default_rng(6)
    sets = gates._replace(
        A_log=jnp.asarray(rng.uniform(-1, 1, (LAYERS, case.heads)), jnp.float32),
        dt_bias=jnp.asarray(rng.uniform(-1, 1, (LAYERS, *gates.dt_bias.shape)), jnp.float32),
    )
    pool = jnp.tile(jnp.asarray(state_of(case), jnp.float32), (5, LAYERS, 1, 1, 1))
    segments = Segments(*map(jnp.asarray, (CU, LOAD, STORE)))
    layers = np.where(LAYER == 1, 0, LAYER)
    run = functools.partial(
        ragged_gated_delta_rule,
        activation=ACTIVATION,
        implementation=implementation,
        interpret=implementation == "pallas",
    )
    found, after = jax.jit(run)(qkv, sets, pool, jnp.asarray(layers), segments)
    of_token = np.repeat(layers, np.diff(CU))
    for layer in (0, 2):
        own = gates._replace(A_log=sets.A_log[layer], dt_bias=sets.dt_bias[layer])
        alone, states = jax.jit(run, static_argnums=3)(qkv, own, pool, layer, segments)
        mine = np.flatnonzero(of_token == layer)
        assert_close("outputs", found[mine], alone[mine], F32_BOUND)
        slots = STORE[(layers == layer) & (STORE >= 0)]
        assert_close("states", after[slots, layer], states[slots, layer], F32_BOUND)


@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=list(HEAD_SHAPES))
def test_lowers_for_cuda(shape: HeadShape) -> None:
    qkv, gates = shape.inputs(1000)

    def of_layers(x: Any) -> Any:
        return jax.ShapeDtypeStruct((LAYERS, *x.shape), x.dtype)

    gates = gates._replace(A_log=of_layers(gates.A_log), dt_bias=of_layers(gates.dt_bias))
    layers = jax.ShapeDtypeStruct((4,), jnp.int32)
    replay = functools.partial(suffix_replay, implementation="pallas")
    text = lower_for_cuda(replay, qkv, gates, shape.pool(9, LAYERS), layers, segments_shape(4))
    assert text.count("__gpu$xla.gpu.triton") == 3
