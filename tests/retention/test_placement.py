"""The two assignment algorithms of dasc figure 9, against their definitions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jhybrid.retention.placement import (
    _greedy,
    assign_bundles,
    balance_storage,
    bundle_order,
    load_objective,
)

COUNTS = st.sampled_from([1, 2, 4, 8]).flatmap(
    lambda tp: arrays(np.int64, tp, elements=st.integers(0, 50))
)
COSTS = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)).flatmap(
    lambda pair: st.tuples(
        st.just(pair[0]),
        arrays(
            np.int64,
            st.tuples(st.integers(1, 4), st.just(pair[0] * pair[1])),
            elements=st.integers(0, 9),
        ),
    )
)
EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def loads_of(costs: np.ndarray, owners: np.ndarray, tp: int) -> np.ndarray:
    return np.array([int(costs[owners == rank].sum()) for rank in range(tp)])


def plain_greedy(costs: np.ndarray, tp: int) -> np.ndarray:
    """Steps 1 and 2 of algorithm (a), word by word."""
    loads, owners = [0] * tp, np.zeros(costs.shape, int)
    quota = costs.shape[1] // tp
    for layer, row in enumerate(costs):
        used = [0] * tp
        for b in sorted(range(len(row)), key=lambda b: (-row[b], b)):
            keys = [(loads[r] + row[b], loads[r], used[r], r) for r in range(tp) if used[r] < quota]
            rank = min(keys)[3]
            owners[layer, b] = rank
            used[rank] += 1
            loads[rank] += row[b]
    return owners


def plain_swap(costs: np.ndarray, owners: np.ndarray, tp: int) -> np.ndarray | None:
    """Steps 4 to 6: the assignment after the best swap, or None."""
    best, found = load_objective(loads_of(costs, owners, tp)), None
    for layer, row in enumerate(costs):
        for b1 in range(len(row)):
            for b2 in range(b1 + 1, len(row)):
                if owners[layer, b1] == owners[layer, b2]:
                    continue
                tried = owners.copy()
                tried[layer, [b1, b2]] = owners[layer, [b2, b1]]
                phi = load_objective(loads_of(costs, tried, tp))
                if phi < best:
                    best, found = phi, tried
    return found


@EXAMPLES
@given(COSTS)
def test_bundles_are_those_of_the_plain_algorithm(case: tuple[int, np.ndarray]) -> None:
    tp, costs = case
    owners = plain_greedy(costs, tp)
    np.testing.assert_array_equal(_greedy(costs, tp)[0], owners)
    while (improved := plain_swap(costs, owners, tp)) is not None:
        owners = improved
    np.testing.assert_array_equal(assign_bundles(costs, tp), owners)


@EXAMPLES
@given(COSTS)
def test_bundles_fill_quotas_never_worsen_and_end_locally_optimal(
    case: tuple[int, np.ndarray],
) -> None:
    tp, costs = case
    owners = assign_bundles(costs, tp)
    for row in owners:
        assert Counter(row.tolist()) == dict.fromkeys(range(tp), costs.shape[1] // tp)
    greedy = load_objective(loads_of(costs, plain_greedy(costs, tp), tp))
    assert load_objective(loads_of(costs, owners, tp)) <= greedy
    assert plain_swap(costs, owners, tp) is None


def test_a_swap_repairs_what_greedy_leaves() -> None:
    costs = np.array([[9, 7, 6, 6, 5, 5]])
    assert loads_of(costs, plain_greedy(costs, 2), 2).tolist() == [20, 18]
    assert loads_of(costs, assign_bundles(costs, 2), 2).tolist() == [19, 19]


def test_order_gives_each_rank_its_bundles() -> None:
    owners = np.array([[1, 0, 1, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(bundle_order(owners), [[1, 3, 0, 2], [0, 1, 2, 3]])


def test_bundles_must_divide() -> None:
    with pytest.raises(ValueError, match="tp: expected a divisor of 6 bundles, got 4"):
        assign_bundles(np.ones((2, 6), np.int64), 4)


@EXAMPLES
@given(COUNTS)
def test_storage_moves_every_excess_unit_once(counts: np.ndarray) -> None:
    placed = balance_storage(counts)
    tp, total = len(counts), int(counts.sum())
    assert placed.slot_units == -(-total // tp)
    richest = sorted(range(tp), key=lambda r: (-counts[r], r))[: total % tp]
    targets = np.array([total // tp + (r in richest) for r in range(tp)])
    assert placed.remote == np.maximum(0, counts - targets).sum()
    np.testing.assert_array_equal(placed.kept, np.minimum(counts, targets))

    moves = list(
        zip(
            *(getattr(placed, f).tolist() for f in ("source", "unit", "target", "position")),
            strict=True,
        )
    )
    assert all(source != target for source, _, target, _ in moves)
    moved = [(source, unit) for source, unit, _, _ in moves]
    here = [(r, u) for r in range(tp) for u in range(placed.kept[r])]
    every = [(r, u) for r in range(tp) for u in range(counts[r])]
    assert sorted(moved + here) == every  # each unit is in one place
    places = [(target, position) for _, _, target, position in moves] + here
    assert sorted(places) == [(r, p) for r in range(tp) for p in range(targets[r])]
    assert moved == sorted(moved)  # by source rank, then unit
    assert places[: len(moves)] == sorted(places[: len(moves)])


def test_storage_by_hand() -> None:
    placed = balance_storage(np.array([1, 7, 0, 3]))  # 11 units: 3 a rank, 2 on the poorest
    assert placed.slot_units == 3
    assert placed.kept.tolist() == [1, 3, 0, 3]
    assert placed.source.tolist() == [1, 1, 1, 1]
    assert placed.unit.tolist() == [3, 4, 5, 6]
    assert placed.target.tolist() == [0, 0, 2, 2]
    assert placed.position.tolist() == [1, 2, 0, 1]
    assert balance_storage(np.array([4, 5, 4])).remote == 0
