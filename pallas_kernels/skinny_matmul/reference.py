"""The products in plain XLA."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from ..precision import working_dtype

Norm = tuple[Array, float]  # weight [K] float32, eps


def rms_norm(
    x: Float[Array, "... K"], weight: Float[Array, " K"], eps: float
) -> Float[Array, "... K"]:
    """w x / sqrt(mean(x^2) + eps) over the last axis, in float32, cast back to x's dtype."""
    work = x.astype(working_dtype(x))
    variance = jnp.mean(work * work, axis=-1, keepdims=True)
    return (work * lax.rsqrt(variance + eps) * weight.astype(work.dtype)).astype(x.dtype)


def skinny_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Callable[..., Array] | None = None,
    dtype: DTypeLike | None = None,
    norm: Norm | None = None,
) -> Float[Array, "M N"]:
    """combine(x W_1^T, ..., x W_G^T), in float32, rounded to `dtype` (default: x's).

    With `norm` the rows of x are RMS-normalised first. The products are rounded to x's type before
    they are combined: with many rows, writing and reading them in float32 would cost more than the
    combination.
    """
    groups, count, inner = weights.shape
    x = x if norm is None else rms_norm(x, *norm)
    dtype = dtype if dtype is not None else x.dtype
    first = dtype if combine is None else x.dtype
    matrix = weights.reshape(groups * count, inner)
    both = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=first)
    if combine is None:
        return both
    parts = both.astype(working_dtype(x)).reshape(-1, groups, count)
    return combine(*(parts[:, group] for group in range(groups))).astype(dtype)
