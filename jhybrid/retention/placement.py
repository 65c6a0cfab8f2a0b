"""Balancing kept units over tensor-parallel ranks (dasc appendix B.1, figure 9).

(a) `assign_bundles` chooses the heads that each rank computes: a permutation of head bundles,
applied once to the weights. (b) `balance_storage` chooses the rank that stores each packed unit;
units stored away from where they are computed travel at every store and load.
Both are deterministic, so that all ranks and all starts agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int, Int32

from ..config import require

PlacementKind = Literal["off", "storage", "hybrid"]
PLACEMENTS: tuple[PlacementKind, ...] = ("off", "storage", "hybrid")


def assign_bundles(costs: Int[np.ndarray, "Ll N"], tp: int) -> Int[np.ndarray, "Ll N"]:
    """Algorithm (a): the rank that computes each bundle, N / P bundles a rank in every layer.

    Greedy in (layer, descending cost, bundle), then single swaps within a layer until none
    improves (largest load, sum of squared loads).
    """
    require(
        tp >= 1 and costs.shape[1] % tp == 0, "tp", tp, f"a divisor of {costs.shape[1]} bundles"
    )
    owners, loads = _greedy(costs.astype(np.int64), tp)
    return _refine(costs.astype(np.int64), owners, loads)


def _greedy(
    costs: Int[np.ndarray, "Ll N"], tp: int
) -> tuple[Int[np.ndarray, "Ll N"], Int[np.ndarray, " P"]]:
    owners = np.empty(costs.shape, np.int64)
    loads, quota = np.zeros(tp, np.int64), costs.shape[1] // tp
    for layer, row in enumerate(costs):
        counts = np.zeros(tp, np.int64)
        for bundle in np.argsort(-row, kind="stable"):
            open_ranks = (rank for rank in range(tp) if counts[rank] < quota)
            # L_r + C orders as L_r does: the bundle's cost is the same on every rank
            owner = min(open_ranks, key=lambda rank: (loads[rank], counts[rank], rank))
            owners[layer, bundle] = owner
            counts[owner] += 1
            loads[owner] += row[bundle]
    return owners, loads


def load_objective(loads: Int[np.ndarray, " P"]) -> tuple[int, int]:
    """Phi(L) = (max L_r, sum L_r^2), compared lexicographically."""
    return int(loads.max()), int((loads**2).sum())


def _refine(
    costs: Int[np.ndarray, "Ll N"],
    owners: Int[np.ndarray, "Ll N"],
    loads: Int[np.ndarray, " P"],
) -> Int[np.ndarray, "Ll N"]:
    """Apply the best strictly improving swap, the first of equals, until there is none."""
    owners, loads = owners.copy(), loads.copy()
    first, second = np.triu_indices(costs.shape[1], k=1)  # the paper's order of pairs
    while True:
        best = _best_swap(costs, owners, loads, first, second)
        if best is None or best[0] >= load_objective(loads):
            return owners
        _, layer, b1, b2 = best
        r1, r2 = owners[layer, b1], owners[layer, b2]
        moved = costs[layer, b2] - costs[layer, b1]
        loads[r1] += moved
        loads[r2] -= moved
        owners[layer, b1], owners[layer, b2] = r2, r1


def _best_swap(
    costs: Int[np.ndarray, "Ll N"],
    owners: Int[np.ndarray, "Ll N"],
    loads: Int[np.ndarray, " P"],
    first: Int[np.ndarray, " M"],
    second: Int[np.ndarray, " M"],
) -> tuple[tuple[int, int], int, int, int] | None:
    """(Phi after it, layer, b1, b2) of the best swap; every pair of every layer at once."""
    r1, r2 = owners[:, first], owners[:, second]
    moved = costs[:, second] - costs[:, first]
    layer, pair = np.nonzero((r1 != r2) & (moved != 0))  # the others change nothing
    if not layer.size:
        return None
    r1, r2, moved = r1[layer, pair], r2[layer, pair], moved[layer, pair]
    new1, new2 = loads[r1] + moved, loads[r2] - moved
    largest = np.maximum(np.maximum(new1, new2), _largest_of_others(loads)[r1, r2])
    squares = (loads**2).sum() + new1**2 + new2**2 - loads[r1] ** 2 - loads[r2] ** 2
    candidates = np.flatnonzero(largest == largest.min())
    at = candidates[squares[candidates].argmin()]  # argmin gives the first
    pair = pair[at]
    phi = (int(largest[at]), int(squares[at]))
    return phi, int(layer[at]), int(first[pair]), int(second[pair])


def _largest_of_others(loads: Int[np.ndarray, " P"]) -> Int[np.ndarray, "P P"]:
    """The largest load among ranks other than r1 and r2, or 0."""
    ranks = np.arange(len(loads))
    out = np.zeros((len(loads), len(loads)), np.int64)
    for rank in ranks[np.argsort(loads, kind="stable")]:  # larger loads overwrite smaller ones
        other = (ranks[:, None] != rank) & (ranks[None, :] != rank)
        out[other] = loads[rank]
    return out


def bundle_order(owners: Int[np.ndarray, "Ll N"]) -> Int[np.ndarray, "Ll N"]:
    """Bundles of each layer in the order that gives rank r the r-th N / P of them."""
    return np.argsort(owners, axis=1, kind="stable")


@dataclass(frozen=True, eq=False)
class StoragePlacement:
    """Algorithm (b): which rank stores which unit, and where in its slot.

    `kept[r]` counts the units that rank r stores itself: its first ones, at the same positions.
    Unit `unit[i]` of rank `source[i]` is stored at `position[i]` of rank `target[i]` != source.
    """

    slot_units: int  # ceil(N / P) on every rank
    kept: Int[np.ndarray, " P"]
    source: Int32[np.ndarray, " M"]
    unit: Int32[np.ndarray, " M"]
    target: Int32[np.ndarray, " M"]
    position: Int32[np.ndarray, " M"]

    @property
    def remote(self) -> int:
        """M_remote: units that travel, each once; without any the exchange is skipped."""
        return len(self.unit)


def balance_storage(counts: Int[np.ndarray, " P"]) -> StoragePlacement:
    """Spread `counts[r]` packed units of each rank evenly, moving as few as possible."""
    ranks = np.arange(len(counts))
    share, more = divmod(int(counts.sum()), len(counts))
    targets = np.full(len(counts), share, np.int64)
    targets[np.argsort(-counts, kind="stable")[:more]] += 1
    kept = np.minimum(counts, targets)
    excess, deficit = counts - kept, targets - kept
    source, target = np.repeat(ranks, excess), np.repeat(ranks, deficit)
    return StoragePlacement(
        slot_units=share + (more > 0),
        kept=kept,
        source=source.astype(np.int32),
        unit=(kept[source] + _number_within(excess)).astype(np.int32),
        target=target.astype(np.int32),
        position=(kept[target] + _number_within(deficit)).astype(np.int32),
    )


def _number_within(sizes: Int[np.ndarray, " P"]) -> Int[np.ndarray, " M"]:
    """0, 1, ... sizes[0] - 1, 0, 1, ... sizes[1] - 1, ..."""
    starts = np.repeat(sizes.cumsum() - sizes, sizes)
    return np.arange(sizes.sum()) - starts
