"""Matrix products of the layers: weights are [out..., in...], partial sums meet over `tp`.

Sums are in float32 whatever the result. A decode step's few rows go to a kernel that streams the
weights (see pallas_kernels.skinny_matmul), where products of the same rows share a launch, and the
residual stream is added before the result is stored. The many rows of a prefill, which says how
many of them (`count`) are no padding, go to cuBLAS or to pallas_kernels.tiled_matmul: it leaves out
padding, and an activation, which would be a pass over memory, costs it nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array, lax

from pallas_kernels import Product, skinny_matmuls, tiled_matmul
from pallas_kernels.precision import working_dtype
from pallas_kernels.skinny_matmul.reference import Norm

from ..sharding import AXIS
from .norm import Normed, rms_norm

# Rows from which a tiled product pays: of two matrices that are combined, and of one. A start
# lowers each in every program that has it, .65 s of Python on its one thread.
COMBINED_ROWS, PLAIN_ROWS = 4096, 16384


def project(
    x: Array | Normed, weight: Array, *, dtype: Any = None, count: Array | None = None
) -> Array:
    """x [..., D] times weight [*out, D], giving [..., *out] in `dtype` (default: x's)."""
    return project_all(x, Factor(weight[None], dtype), count=count)[0]


class Factor(NamedTuple):
    """Weights [G, *out, D] that make G results in `dtype` (default: x's)."""

    weights: Array
    dtype: Any = None


def project_all(
    x: Array | Normed, *factors: Factor, count: Array | None = None
) -> tuple[Array, ...]:
    """The results [..., *out] of x [..., D] times the weights of each factor, in order."""
    rows, norm = _rows(x, x.ndim - 1)
    products = [Product(_matrices(w, w.ndim - 2), dtype=dtype) for w, dtype in factors]
    shapes = [w.shape[1:-1] for w, _ in factors for _ in range(w.shape[0])]
    found = _multiply(rows, products, norm, count)
    return tuple(y.reshape(*x.shape[:-1], *s) for y, s in zip(found, shapes, strict=True))


def gated_project(
    x: Array | Normed,
    weight: Array,
    activation: Callable[[Array, Array], Array],
    *,
    count: Array | None = None,
) -> Array:
    """activation(x W_0, x W_1) in float32 for weight [2, *out, D], giving [..., *out]."""
    rows, norm = _rows(x, x.ndim - 1)
    product = Product(_matrices(weight, weight.ndim - 2), activation)
    found = _multiply(rows, (product,), norm, count)[0]
    return found.reshape(*x.shape[:-1], *weight.shape[1:-1])


def reduce_project(
    x: Array,
    weight: Array,
    residual: Array | None = None,
    *,
    dtype: Any = None,
    count: Array | None = None,
) -> Array:
    """x [..., *in] times weight [D, *in], summed over the ranks' shares, plus the residual.

    The result is [..., D] in `dtype`: by default the residual's, else x's.
    """
    lead = x.shape[: x.ndim - (weight.ndim - 1)]
    if dtype is None:
        dtype = x.dtype if residual is None else residual.dtype
    rows, _ = _rows(x, len(lead))
    matrices, shape = _matrices(weight[None], 1), (*lead, weight.shape[0])
    if lax.axis_size(AXIS) == 1:
        before = None if residual is None else residual.reshape(rows.shape[0], -1)
        product = Product(matrices, dtype=dtype, residual=before)
        return _multiply(rows, (product,), None, count)[0].reshape(shape)
    partial = skinny_matmuls(rows, (Product(matrices, dtype=working_dtype(x)),))[0]
    out = lax.psum(partial.reshape(shape), AXIS).astype(dtype)
    return out if residual is None else out + residual


def _multiply(
    x: Array, products: Sequence[Product], norm: Norm | None, count: Array | None
) -> tuple[Array, ...]:
    """The results of the products in order, by the op that suits so many rows."""
    if count is None or x.shape[0] < COMBINED_ROWS:
        return skinny_matmuls(x, products, norm)
    x, found = x if norm is None else rms_norm(x, *norm), []
    for product in products:
        weights, combine, dtype, residual = product
        few = x.shape[0] < (COMBINED_ROWS if combine else PLAIN_ROWS)
        if few or dtype not in (None, x.dtype):  # gates are float32, and narrow
            found += skinny_matmuls(x, (product,))
            continue
        groups = (weights,) if combine else (w[None] for w in weights)
        found += (tiled_matmul(x, w, combine, residual, count) for w in groups)
    return tuple(found)


def _rows(x: Array | Normed, lead: int) -> tuple[Array, Norm | None]:
    """x [*lead, *in] as a matrix, and the norm that is still to be applied to it."""
    norm = None
    if isinstance(x, Normed):
        x, norm = x.x, (x.weight, x.eps)
    return x.reshape(math.prod(x.shape[:lead]), -1), norm


def _matrices(weights: Array, outs: int) -> Array:
    """[G, *outs, *in] as G matrices."""
    return weights.reshape(weights.shape[0], math.prod(weights.shape[1 : 1 + outs]), -1)
