"""Plans: what is kept, the controls that keep as many, and the replay bound of eq. 7."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jhybrid.retention.horizon import Horizons
from jhybrid.retention.selection import (
    RANDOM_SEEDS,
    RetentionPlan,
    empty_plan,
    full_plan,
    inverse_plan,
    random_plan,
    select,
)

from .plans import KINDS, tiny_horizons, tiny_model


def horizons(*values: float) -> Horizons:
    return Horizons(np.array(values).reshape(1, -1, 1), 1, -0.3, 1e-3, "")


@pytest.mark.parametrize("kind", KINDS)
def test_controls_keep_as_many_in_every_layer(kind: str) -> None:
    found = tiny_horizons(tiny_model(kind))
    plan = select(found, 32)
    assert 0 < plan.kept_fraction < 1
    np.testing.assert_array_equal(plan.keep, found.values > 32)
    controls = [random_plan(found, 32, seed) for seed in RANDOM_SEEDS] + [inverse_plan(found, 32)]
    for control in controls:
        np.testing.assert_array_equal(control.kept_per_layer, plan.kept_per_layer)
    masks = [plan.keep, *(control.keep for control in controls)]
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    again = random_plan(found, 32, RANDOM_SEEDS[0])
    np.testing.assert_array_equal(again.keep, controls[0].keep)
    for values, kept in zip(found.values, controls[-1].keep, strict=True):
        assert values[kept].max() <= values[~kept].min()  # inverse: the shortest


def test_random_plans_are_uniform() -> None:
    found = horizons(*range(1, 21))
    drawn = np.mean([random_plan(found, 15, seed).keep for seed in range(2000)], axis=0)
    np.testing.assert_allclose(drawn, 5 / 20, atol=0.05)


def test_a_horizon_equal_to_the_cutoff_is_local() -> None:
    assert select(horizons(15.9, 16.0, 16.1), 16).keep.ravel().tolist() == [False, False, True]


def test_full_and_empty() -> None:
    found = horizons(3, 300, math.inf)
    full, empty = full_plan(found, 64), empty_plan(found, 64)
    assert (full.kept_fraction, full.longest_omitted, full.replay_tokens(1000)) == (1, 0, 0)
    assert (empty.kept_fraction, empty.longest_omitted) == (0, math.inf)
    assert empty.replay_tokens(1000) == 64


@pytest.mark.parametrize(
    ("longest", "w_max", "prefix", "expected"),
    [
        (1.5, 64, 1000, 4),  # never below 4
        (4.0, 64, 1000, 4),
        (4.1, 64, 1000, 8),
        (17.0, 64, 1000, 32),
        (64.0, 64, 1000, 64),
        (40.0, 48, 1000, 48),  # the cutoff need not be a power of two
        (17.0, 64, 20, 20),  # no more than the prefix
        (17.0, 64, 0, 0),
        (0.0, 64, 1000, 4),  # next_pow2(0) = 4
    ],
)
def test_replay_bound(longest: float, w_max: int, prefix: int, expected: int) -> None:
    plan = select(horizons(longest, longest / 3, 1e6), w_max)
    assert plan.longest_omitted == longest
    assert plan.replay_tokens(prefix) == expected


def test_controls_replay_no_further_than_the_cutoff() -> None:
    found = horizons(5, 50, 500, 5000)
    assert inverse_plan(found, 64).replay_tokens(10**6) == 64


def test_row_mask_repeats_a_head_over_its_rows() -> None:
    plan = select(replace(horizons(5, 500), rows=3), 64)
    assert plan.row_mask.tolist() == [[[False] * 3, [True] * 3]]


def test_bad_plans_are_refused() -> None:
    found = horizons(5, 50)
    with pytest.raises(ValueError, match="w_max: expected at least 4 tokens, got 2"):
        select(found, 2)
    with pytest.raises(ValueError, match="keep: expected the units' shape"):
        RetentionPlan(np.zeros((1, 3, 1), bool), found, 16, "x")
