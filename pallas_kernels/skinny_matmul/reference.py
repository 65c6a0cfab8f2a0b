"""The products in plain XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from ..precision import working_dtype

Norm = tuple[Array, float]  # weight [K] float32, eps


class Window(NamedTuple):
    """A short convolution with silu behind a product, one token for each row, as
    `decode_causal_conv1d` has it: of the product's H heads of X channels the first W each.

    A row's window, its last J - 1 inputs, is shifted in its slot of the pool; -1: there is none.
    """

    weights: Float[Array, "H W J"]
    pool: Float[Array, "S L J1 C"]
    layer: int | Array
    slots: Int32[Array, " M"]


class Product(NamedTuple):
    """combine(x W_1^T, ..., x W_G^T) + residual, rounded to `dtype` (default: x's).

    `combine` is elementwise; without it each x W_g^T is a result of its own.
    A residual has the result's dtype. With a `window`, of one matrix and nothing else, two more
    results follow: the convolved channels [M, C] and the pool.
    """

    weights: Float[Array, "G N K"]
    combine: Callable[..., Array] | None = None
    dtype: DTypeLike | None = None
    residual: Float[Array, "M N"] | None = None
    window: Window | None = None

    @property
    def results(self) -> int:
        """Of its matrices."""
        return 1 if self.combine else self.weights.shape[0]


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
    """The results of the products in order, but for their windows; with `norm` the rows of x are
    RMS-normalised first."""
    x = x if norm is None else rms_norm(x, *norm)
    return tuple(y for product in products for y in _results(x, product))


def _results(x: Array, product: Product) -> list[Array]:
    """Products are rounded to x's type before they are combined: with many rows, writing and
    reading them in float32 would cost more than the combination."""
    weights, combine, dtype, residual, _ = product
    groups, count, inner = weights.shape
    dtype = dtype if dtype is not None else x.dtype
    first = dtype if combine is None else x.dtype
    matrix = weights.reshape(groups * count, inner)
    out = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=first)
    results = [out[:, group * count : (group + 1) * count] for group in range(groups)]
    if combine is not None:
        results = [combine(*(y.astype(working_dtype(x)) for y in results)).astype(dtype)]
    return results if residual is None else [y + residual for y in results]
