"""The product in plain XLA."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from ..skinny_matmul.reference import Product, skinny_matmuls

Combine = Callable[..., Array]


def tiled_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Combine | None = None,
    count: Int32[Array, ""] | None = None,
) -> Float[Array, "M N"]:
    """Every row is multiplied; those from `count` on are then zeros."""
    (out,) = skinny_matmuls(x, (Product(weights, combine),))
    if count is None:
        return out
    return jnp.where((jnp.arange(x.shape[0]) < count)[:, None], out, 0)
