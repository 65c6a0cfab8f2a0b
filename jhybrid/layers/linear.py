"""Matrix products of the layers: weights are [out..., in...], partial sums meet over `tp`.

Sums are in float32 whatever the result: a product rounds once, at its end. A decode step's few rows
go to a kernel that streams the weights (see pallas_kernels.skinny_matmul).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax import Array, lax

from pallas_kernels import skinny_matmul
from pallas_kernels.precision import working_dtype

from ..sharding import AXIS
from .norm import Normed


def project(x: Array | Normed, weight: Array, *, dtype: Any = None) -> Array:
    """x [..., D] times weight [*out, D], giving [..., *out] in `dtype` (default: x's)."""
    return _product(x, weight[None], x.ndim - 1, weight.ndim - 1, None, dtype)


def gated_project(
    x: Array | Normed, weight: Array, activation: Callable[[Array, Array], Array]
) -> Array:
    """activation(x W_0, x W_1) in float32 for weight [2, *out, D], giving [..., *out]."""
    return _product(x, weight, x.ndim - 1, weight.ndim - 2, activation, None)


def reduce_project(x: Array, weight: Array, *, dtype: Any = None) -> Array:
    """x [..., *in] times weight [D, *in], giving [..., D], summed over the ranks' shares."""
    dtype = dtype if dtype is not None else x.dtype
    partial = working_dtype(x) if lax.axis_size(AXIS) > 1 else dtype
    lead = x.ndim - (weight.ndim - 1)
    out = _product(x, weight[None], lead, 1, None, partial)
    return lax.psum(out, AXIS).astype(dtype)


def _product(
    x: Array | Normed, weights: Array, lead: int, outs: int, combine: Any, dtype: Any
) -> Array:
    """x [*lead, *in] times weights [G, *outs, *in], as matrices."""
    norm = None
    if isinstance(x, Normed):
        x, norm = x.x, (x.weight, x.eps)
    shape, out = x.shape[:lead], weights.shape[1 : 1 + outs]
    rows = x.reshape(math.prod(shape), -1)
    matrices = weights.reshape(weights.shape[0], math.prod(out), -1)
    return skinny_matmul(rows, matrices, combine, dtype, norm).reshape(*shape, *out)
