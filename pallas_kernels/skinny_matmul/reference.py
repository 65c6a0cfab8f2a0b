"""The products in plain XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from ..precision import working_dtype

Norm = tuple[Array, float]  # weight [K] float32, eps


class Product(NamedTuple):
    """combine(x W_1^T, ..., x W_G^T) + residual, rounded to `dtype` (default: x's).

    `combine` is elementwise; None needs G = 1. A residual has the result's dtype.
    """

    weights: Float[Array, "G N K"]
    combine: Callable[..., Array] | None = None
    dtype: DTypeLike | None = None
    residual: Float[Array, "M N"] | None = None


def rms_norm(
    x: Float[Array, "... K"], weight: Float[Array, " K"], eps: float
) -> Float[Array, "... K"]:
    """w x / sqrt(mean(x^2) + eps) over the last axis, in float32, cast back to x's dtype."""
    work = x.astype(working_dtype(x))
    variance = jnp.mean(work * work, axis=-1, keepdims=True)
    return (work * lax.rsqrt(variance + eps) * weight.astype(work.dtype)).astype(x.dtype)


def skinny_matmuls(
    x: Float[Array, "M K"], products: Sequence[Product], norm: Norm | None = None
) -> tuple[Float[Array, "M N"], ...]:
    """Each of the products of x, whose rows are RMS-normalised first with `norm`."""
    x = x if norm is None else rms_norm(x, *norm)
    return tuple(_one(x, product) for product in products)


def _one(x: Array, product: Product) -> Array:
    """Products are rounded to x's type before they are combined: with many rows, writing and
    reading them in float32 would cost more than the combination."""
    weights, combine, dtype, residual = product
    groups, count, inner = weights.shape
    dtype = dtype if dtype is not None else x.dtype
    first = dtype if combine is None else x.dtype
    matrix = weights.reshape(groups * count, inner)
    out = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=first)
    if combine is not None:
        parts = out.astype(working_dtype(x)).reshape(-1, groups, count)
        out = combine(*(parts[:, group] for group in range(groups))).astype(dtype)
    return out if residual is None else out + residual
