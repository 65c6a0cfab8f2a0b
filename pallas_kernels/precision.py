"""The precision that arithmetic is done in, whatever the precision values are stored in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def working_dtype(x: Array) -> Any:
    """float32, or float64 for float64 inputs (oracles)."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
