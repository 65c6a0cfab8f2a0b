"""What tells a model's weights from others: part of the keys that runs resume by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def moments(params: Any) -> list[list[float]]:
    """Sum and sum of squares of every weight: trained again under its name, a model is another."""
    return [_moments(leaf).tolist() for leaf in jax.tree.leaves(params)]


@jax.jit  # in one pass: beside an engine's pools there is no room for a float32 copy
def _moments(w: Array) -> Array:
    w = w.astype(jnp.float32)
    return jnp.stack([jnp.sum(w), jnp.sum(jnp.square(w))])
