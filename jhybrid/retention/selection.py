"""Which units of recurrent state a checkpoint keeps (dasc section 4.1), and how far to replay.

A unit is global, and kept, iff H_s > w_max; otherwise it is local, and omitted. The other plans
are controls: as many units of every layer at random or from the short end, all, none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from ..config import require
from .horizon import Horizons

RANDOM_SEEDS = (1234, 2027, 3407, 4519, 5683)  # of the paper's count-matched masks
SHORTEST_REPLAY = 4  # tokens, eq. 7


@dataclass(frozen=True, eq=False)
class RetentionPlan:
    """The units that checkpoints keep, fixed before serving.

    `keep` [Ll, H, U] follows `horizons.values`; `rule` says how it was chosen: "horizon",
    "random-SEED", "inverse", "full" or "empty".
    """

    keep: Bool[np.ndarray, "Ll H U"]
    horizons: Horizons
    w_max: int
    rule: str

    def __post_init__(self) -> None:
        require(self.w_max >= SHORTEST_REPLAY, "w_max", self.w_max, "at least 4 tokens")
        shape = self.horizons.values.shape
        require(self.keep.shape == shape, "keep", self.keep.shape, f"the units' shape {shape}")
        require(self.keep.dtype == np.bool_, "keep", self.keep.dtype, "booleans")

    @property
    def kept_per_layer(self) -> Int[np.ndarray, " Ll"]:
        """r_l of the paper."""
        return self.keep.sum(axis=(1, 2))

    @property
    def kept_fraction(self) -> float:
        return float(self.keep.mean())

    @property
    def row_mask(self) -> Bool[np.ndarray, "Ll H K"]:
        """The kept rows of a state; a GDN head keeps all of its key rows."""
        return np.repeat(self.keep, self.horizons.rows, axis=2)

    @property
    def longest_omitted(self) -> float:
        """The longest horizon among omitted units in tokens; 0 when nothing is omitted."""
        return float(self.horizons.values[~self.keep].max(initial=0.0))

    @property
    def replay_window(self) -> int:
        """max W_u over omitted units, before the cap by the prefix; 0 when nothing is omitted."""
        omitted = self.horizons.values[~self.keep]
        return int(replay_windows(omitted, self.w_max).max(initial=0))

    def replay_tokens(self, prefix: int) -> int:
        """W_replay of eq. 7 for a cached prefix of n_p tokens."""
        return min(prefix, self.replay_window)


def replay_windows(horizons: Float[np.ndarray, " N"], w_max: int) -> Int[np.ndarray, " N"]:
    """W_u = clamp(next_pow2(H_s), 4, w_max) of eq. 7, where next_pow2(0) is 4."""
    bounded = np.clip(horizons, SHORTEST_REPLAY, w_max)
    return np.minimum(2 ** np.ceil(np.log2(bounded)), w_max).astype(np.int64)


def select(horizons: Horizons, w_max: int) -> RetentionPlan:
    """The plan of the paper: keep a unit iff its horizon is longer than `w_max` tokens."""
    return RetentionPlan(horizons.values > w_max, horizons, w_max, "horizon")


def random_plan(horizons: Horizons, w_max: int, seed: int) -> RetentionPlan:
    """In every layer as many units as `select` keeps, drawn uniformly."""
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random(_flat(horizons).shape), axis=1)
    return _first(order, horizons, w_max, f"random-{seed}")


def inverse_plan(horizons: Horizons, w_max: int) -> RetentionPlan:
    """In every layer as many units as `select` keeps, but those of the shortest horizons."""
    order = np.argsort(_flat(horizons), axis=1, kind="stable")
    return _first(order, horizons, w_max, "inverse")


def full_plan(horizons: Horizons, w_max: int) -> RetentionPlan:
    return RetentionPlan(np.ones_like(horizons.values, np.bool_), horizons, w_max, "full")


def empty_plan(horizons: Horizons, w_max: int) -> RetentionPlan:
    return RetentionPlan(np.zeros_like(horizons.values, np.bool_), horizons, w_max, "empty")


def _flat(horizons: Horizons) -> Float[np.ndarray, "Ll N"]:
    return horizons.values.reshape(len(horizons.values), -1)


def _first(
    order: Int[np.ndarray, "Ll N"], horizons: Horizons, w_max: int, rule: str
) -> RetentionPlan:
    """Keep the first r_l of each layer's `order`, r_l being what `select` keeps."""
    counts = select(horizons, w_max).kept_per_layer
    keep = np.zeros(order.shape, np.bool_)
    np.put_along_axis(keep, order, np.arange(order.shape[1]) < counts[:, None], axis=1)
    return RetentionPlan(keep.reshape(horizons.values.shape), horizons, w_max, rule)
