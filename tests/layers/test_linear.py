"""Products of a layer, by whichever op takes so many rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.layers.linear import MANY_ROWS, gated_project
from jhybrid.layers.mlp import activation_of
from jhybrid.layers.norm import Normed
from tests.assertions import assert_close


@pytest.mark.parametrize("rows", [MANY_ROWS, MANY_ROWS - 1])
@pytest.mark.parametrize("normed", [False, True])
def test_padding_changes_no_wanted_row(rows: int, normed: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((rows, 16), (2, 8, 16)))
    scale = jnp.asarray(rng.normal(size=16), jnp.float32)

    def h(x: jax.Array) -> jax.Array | Normed:
        return Normed(x, scale, 1e-6) if normed else x

    count = jnp.int32(1000)
    poisoned = x.at[1000:].set(jnp.nan)
    found = gated_project(h(poisoned), weight, activation_of("silu"), count)[:1000]
    assert_close("wanted", found, gated_project(h(x), weight, activation_of("silu"))[:1000], 1e-6)
