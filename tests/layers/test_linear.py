"""Products of a layer, by whichever op takes so many rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.layers.linear import COMBINED_ROWS, PLAIN_ROWS, Factor, gated_project, project_all
from jhybrid.layers.norm import Normed
from tests.assertions import assert_close


def silu_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.silu(a) * b


@pytest.mark.parametrize("rows", [COMBINED_ROWS, COMBINED_ROWS - 1])
@pytest.mark.parametrize("normed", [False, True])
def test_padding_changes_no_wanted_row(rows: int, normed: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((rows, 16), (2, 8, 16)))
    scale = jnp.asarray(rng.normal(size=16), jnp.float32)

    def h(x: jax.Array) -> jax.Array | Normed:
        return Normed(x, scale, 1e-6) if normed else x

    count = jnp.int32(1000)
    poisoned = x.at[1000:].set(jnp.nan)
    found = gated_project(h(poisoned), weight, silu_product, count=count)[:1000]
    assert_close("wanted", found, gated_project(h(x), weight, silu_product)[:1000], 1e-6)


def test_products_of_a_long_prefill() -> None:
    rng = np.random.default_rng(0)
    x, narrow = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((PLAIN_ROWS, 16), (2, 16)))
    wide = jnp.asarray(rng.normal(size=(2, 8, 16)), jnp.bfloat16)
    factors = Factor(wide), Factor(narrow[None], jnp.float32)
    found = project_all(x.at[1000:].set(jnp.nan), *factors, count=jnp.int32(1000))
    right = project_all(x, *factors)
    assert [y.dtype for y in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for name, y, z in zip(("first", "second", "narrow"), found, right, strict=True):
        assert_close(name, y[:1000].astype(jnp.float32), z[:1000].astype(jnp.float32), 1e-6)
