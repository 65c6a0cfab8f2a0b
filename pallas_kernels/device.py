"""What tunings take for granted of an H200, and what kernels ask of the device that runs them."""

from __future__ import annotations

import jax

MULTIPROCESSORS = 132


def on_hopper() -> bool:
    """wgmma, and copies that two blocks share, are of compute capability 9.0 alone."""
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"
