"""Statistics of the protocols: the problem is the unit, arms are paired, masks are a sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike


class Estimate(NamedTuple):
    mean: float
    error: float  # standard error of the mean; nan for a single observation
    n: int


class PairedDifference(NamedTuple):
    """`low` and `high` bound the central 95 % of bootstrap means over problems."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def estimate(values: ArrayLike) -> Estimate:
    """The mean over problems and its standard error, from the sample SD (ddof 1)."""
    x = np.asarray(values, np.float64)
    error = float(np.std(x, ddof=1) / np.sqrt(x.size)) if x.size > 1 else float("nan")
    return Estimate(float(x.mean()), error, x.size)


def mean_and_sample_sd(values: ArrayLike) -> tuple[float, float]:
    """Over random masks. The SD of a single mask is nan."""
    x = np.asarray(values, np.float64)
    return float(x.mean()), float(np.std(x, ddof=1)) if x.size > 1 else float("nan")


def paired_difference(
    arm: ArrayLike, reference: ArrayLike, *, seed: int = 0, resamples: int = 2000
) -> PairedDifference:
    """Of the same problems under two arms: mean of arm - reference."""
    a, b = np.asarray(arm, np.float64), np.asarray(reference, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired arms must share their problems, got {a.size} and {b.size}")
    difference = a - b
    mean, error, n = estimate(difference)
    low, high = np.quantile(difference[_draws(n, seed, resamples)].mean(axis=1), (0.025, 0.975))
    return PairedDifference(mean, error, float(low), float(high), n)


@functools.lru_cache(maxsize=16)
def _draws(n: int, seed: int, resamples: int) -> Int[np.ndarray, "R N"]:
    """Every bootstrap of n problems draws the same ones, which takes longer than their means."""
    return np.random.default_rng(seed).integers(0, n, (resamples, n))


def median_and_iqr(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the quartiles around it; values that are nan are left out."""
    x = np.asarray(values, np.float64)
    low, middle, high = np.quantile(x[~np.isnan(x)], (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)
