"""The products in plain XLA."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from ..precision import working_dtype


def skinny_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Callable[..., Array] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "M N"]:
    """combine(x W_1^T, ..., x W_G^T), in float32, rounded to `dtype` (default: x's).

    The products are rounded to x's type before they are combined: with many rows, writing and
    reading them in float32 would cost more than the combination.
    """
    groups, count, inner = weights.shape
    dtype = dtype if dtype is not None else x.dtype
    first = dtype if combine is None else x.dtype
    matrix = weights.reshape(groups * count, inner)
    both = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=first)
    if combine is None:
        return both
    parts = both.astype(working_dtype(x)).reshape(-1, groups, count)
    return combine(*(parts[:, group] for group in range(groups))).astype(dtype)
