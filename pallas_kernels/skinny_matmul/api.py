"""The op as users call it, whichever implementation runs."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from ..triton import Implementation, use_pallas
from . import kernel, reference


def skinny_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Callable[..., Array] | None = None,
    dtype: DTypeLike | None = None,
    norm: reference.Norm | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """combine(x W_1^T, ..., x W_G^T) with sums and `combine` in float32.

    `combine` is elementwise; None needs G = 1. With `norm` (weight [K], eps) the rows of x are
    RMS-normalised on the way. Every row's result is the same whatever the others
    are. The kernel takes up to 32 rows of bfloat16; by name, another case is an error.
    """
    if combine is None and weights.shape[0] != 1:
        raise ValueError(f"{weights.shape[0]} weight matrices and nothing to combine them")
    if use_pallas(implementation):
        if kernel.supported(x, weights):
            return kernel.skinny_matmul(x, weights, combine, dtype, norm, interpret=interpret)
        if implementation == "pallas":
            raise NotImplementedError(
                f"x {x.shape} {x.dtype}, weights {weights.shape}: the kernel takes up to "
                f"{kernel.MAX_ROWS} rows of {jnp.bfloat16.__name__} and dims in multiples of 16"
            )
    return reference.skinny_matmul(x, weights, combine, dtype, norm)
