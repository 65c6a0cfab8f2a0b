"""The dense rule against the oracle, and its derivative against that of the recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dense_gated_delta_rule, recurrent_gated_delta_rule
from pallas_kernels.gated_delta_rule.chunk_states import chunk_inverses, chunk_states
from pallas_kernels.gated_delta_rule.dense import LEAF_LIMIT
from tests.assertions import assert_close
from tests.kernels import oracle

NAMES = ("q", "k", "v", "g", "beta")
CUT = 20


dense_rule = jax.jit(dense_gated_delta_rule)


def inputs(length: int, *, per_channel: bool, fastest: float = 6.0) -> list[jax.Array]:
    """Two rows with keys that resemble each other, decays from none to fast, and a clearing."""
    rng = np.random.default_rng(length)
    key_heads, heads, width = (2, 2, 16) if per_channel else (1, 2, 16)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((2, length, *shape))

    rate = np.minimum(np.exp(2 * normal(heads, *([width] if per_channel else [])) - 2), fastest)
    rate[0, CUT] = 60.0
    beta = 1 / (1 + np.exp(-normal(heads)))
    arrays = normal(key_heads, width), normal(key_heads, width) + 1, normal(heads, 16), -rate, beta
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("length", [21, 63, 100])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_every_row_is_the_recurrence(length: int, per_channel: bool) -> None:
    args = inputs(length, per_channel=per_channel)
    found = dense_rule(*args)
    for row in range(2):
        expected, _ = oracle.gated_delta_rule(*(np.asarray(x[row]) for x in args))
        assert_close(f"row {row}", found[row], expected, 5e-5)


def test_floored_decays_cost_nothing() -> None:
    """Of one channel in a leaf; those of whole heads are not floored."""
    args = inputs(70, per_channel=True, fastest=3 * LEAF_LIMIT)
    found = dense_rule(*args)
    expected, _ = oracle.gated_delta_rule(*(np.asarray(x[0]) for x in args))
    assert_close("outputs", found[0], expected, 5e-5)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_derivative_is_that_of_the_recurrence(per_channel: bool, implementation) -> None:
    args = inputs(70, per_channel=per_channel, fastest=12.0)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(args[2].shape), jnp.float32)

    def dense(*args: jax.Array) -> jax.Array:
        o = dense_gated_delta_rule(*args, implementation=implementation, interpret=True)
        return jnp.sum(o * cotangent)

    def recurrent(*args: jax.Array) -> jax.Array:
        o, _ = jax.vmap(recurrent_gated_delta_rule)(*args)
        return jnp.sum(o * cotangent)

    every = tuple(range(5))
    found = jax.jit(jax.grad(dense, every))(*args)
    expected = jax.jit(jax.grad(recurrent, every))(*args)
    for name, x, y in zip(NAMES, found, expected, strict=True):
        assert_close(name, x, y, 1e-4)


def test_derivative_is_finite_for_the_fastest_decays() -> None:
    """Every channel far below the floor in a whole leaf: the factors of a pair above the diagonal
    multiply to more than float32 holds."""
    q, k, v, g, beta = inputs(40, per_channel=True)

    def dense(*args: jax.Array) -> jax.Array:
        return jnp.sum(dense_gated_delta_rule(*args) ** 2)

    gradients = jax.jit(jax.grad(dense, (0, 1, 2, 3, 4)))(q, k, v, g - 3 * LEAF_LIMIT, beta)
    for name, x in zip(NAMES, gradients, strict=True):
        assert np.isfinite(np.asarray(x)).all(), name


def test_kernels_give_what_xla_gives() -> None:
    """Several heads in a group and several blocks of values; chunks of 16."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    shape = (2, 2, 3, 2, 16)
    w, k, u, decay = normal(*shape, 16), normal(*shape, 16), normal(*shape, 64), normal(*shape)
    a = jnp.tril(normal(3, 16, 16), -1)

    def both(implementation) -> tuple[jax.Array, ...]:
        how = {"implementation": implementation, "interpret": True}
        states, pull = jax.vjp(lambda *x: chunk_states(*x, **how), w, k, u, decay)
        return states, *pull(jnp.cos(states)), chunk_inverses(a, **how)

    found, expected = (jax.jit(both, static_argnums=0)(name) for name in ("pallas", "xla"))
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert_close(str(number), x, y, 1e-5)
    np.testing.assert_allclose(found[-1] @ (jnp.eye(16) + a), jnp.eye(16)[None] + 0 * a, atol=1e-5)
