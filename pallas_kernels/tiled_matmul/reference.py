"""The product in plain XLA."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from ..precision import working_dtype

Combine = Callable[..., Array]


def tiled_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Combine | None = None,
    residual: Float[Array, "M N"] | None = None,
    count: Int32[Array, ""] | None = None,
) -> Float[Array, "M N"]:
    """Every row is multiplied; those from `count` on are then zeros."""
    groups, width, inner = weights.shape
    matrix = weights.reshape(groups * width, inner)
    out = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))
    if combine is not None:
        parts = [out[:, g * width : (g + 1) * width] for g in range(groups)]
        out = combine(*(y.astype(working_dtype(x)) for y in parts)).astype(x.dtype)
    out = out if residual is None else out + residual
    if count is None:
        return out
    return jnp.where((jnp.arange(x.shape[0]) < count)[:, None], out, 0)
