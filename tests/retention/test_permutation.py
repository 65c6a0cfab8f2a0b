"""Head permutation: the same function of the tokens, and plan and weights stay in step."""

from __future__ import annotations

import numpy as np
import pytest

from jhybrid.convert.verify import dense_logits
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.layout import kept_per_rank
from jhybrid.retention.permutation import bundle_costs, head_order, permute_params, permute_plan
from jhybrid.retention.selection import select
from jhybrid.sharding import make_mesh
from jhybrid.weights import named
from tests.assertions import assert_close

from .plans import KINDS, tiny_model, tiny_params


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_unchanged(kind: str, tp: int) -> None:
    config, mesh = tiny_model(kind), make_mesh(tp)
    before = tiny_params(config, tp)
    ids = np.random.default_rng(0).integers(0, 64, (2, 40))
    expected = dense_logits(before, ids, config, mesh)
    rng = np.random.default_rng(1)
    order = np.stack([rng.permutation(8) for _ in config.linear_layers])
    names = {n: np.asarray(x) for n, x in named(before).items()}
    shardings = {n: x.sharding for n, x in named(before).items()}
    after = permute_params(before, config, order)
    assert_close("logits", dense_logits(after, ids, config, mesh), expected, 1e-5)
    changed = {n for n, x in named(after).items() if not np.array_equal(names[n], x)}
    leaves = {"A_log", "dt_bias", "conv", "out"}
    leaves |= {"qkvz", "ba"} if kind == "gdn" else {"qkv", "decay_up", "beta", "gate_up"}
    assert changed == {f"layers.{i}.mixer.{leaf}" for i in (0, 2, 3) for leaf in leaves}
    assert {n: x.sharding for n, x in named(after).items()} == shardings


@pytest.mark.parametrize("kind", KINDS)
def test_plan_follows_the_weights(kind: str) -> None:
    """Selecting from permuted weights is permuting the selection."""
    config = tiny_model(kind)
    params = tiny_params(config)
    plan = select(static_horizons(params, config), 64)
    order = head_order(plan, config.linear, 4)
    assert not np.array_equal(order, np.broadcast_to(np.arange(8), order.shape))
    moved = permute_plan(plan, order)
    again = select(static_horizons(permute_params(params, config, order), config), 64)
    np.testing.assert_array_equal(moved.keep, again.keep)
    np.testing.assert_array_equal(moved.horizons.values, again.horizons.values)
    assert kept_per_rank(moved, 4).max() <= kept_per_rank(plan, 4).max()
    np.testing.assert_array_equal(
        np.take_along_axis(bundle_costs(plan, config.linear), order, axis=1),
        bundle_costs(moved, config.linear),
    )
