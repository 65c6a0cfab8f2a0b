"""Comparisons used across tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def relative_rms(value: ArrayLike, reference: ArrayLike) -> float:
    """RMS of the error over the RMS of the reference; inf where anything is not finite."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    assert value.shape == reference.shape, (value.shape, reference.shape)
    if not np.isfinite(value).all():
        return float("inf")
    error, size = np.sqrt(np.mean((value - reference) ** 2)), np.sqrt(np.mean(reference**2))
    return float(error / max(size, 1e-30))


def assert_close(name: str, value: ArrayLike, reference: ArrayLike, bound: float) -> None:
    error = relative_rms(value, reference)
    assert error <= bound, f"{name}: relative RMS {error:.2e}, at most {bound:.0e} expected"
