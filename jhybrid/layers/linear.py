"""Matrix products of the layers: weights are [out..., in...], partial sums meet over `tp`.

Sums are in float32 whatever the result. A decode step's few rows round once, at their end: they go
to a kernel that streams the weights (see pallas_kernels.skinny_matmul), where products of the
same rows share a launch, and the residual stream is added before the result is stored. The many
rows of a prefill go to cuBLAS, but for a gated product: there the activation would be a pass over
memory, and pallas_kernels.tiled_matmul has it beside its products. Both round to x's type before
they combine or add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array, lax

from pallas_kernels import Product, Window, skinny_matmuls, tiled_matmul
from pallas_kernels.precision import working_dtype

from ..sharding import AXIS
from .norm import Normed, value_of

# A start lowers the tiled product in each program that has it, .65 s of Python on its one thread:
# short prefills, which gain less, go without.
MANY_ROWS = 4096


def project(x: Array | Normed, weight: Array, *, dtype: Any = None) -> Array:
    """x [..., D] times weight [*out, D], giving [..., *out] in `dtype` (default: x's)."""
    return project_all(x, Factor(weight[None], dtype))[0]


class Factor(NamedTuple):
    """Weights [G, *out, D] that make G results in `dtype` (default: x's)."""

    weights: Array
    dtype: Any = None


def project_all(x: Array | Normed, *factors: Factor) -> tuple[Array, ...]:
    """The results [..., *out] of x [..., D] times the weights of each factor, in order."""
    rows, norm = _rows(x, x.ndim - 1)
    return _shaped(skinny_matmuls(rows, [_product(f) for f in factors], norm), x, factors)


def project_and_convolve(
    x: Array | Normed, weight: Array, window: Window, *factors: Factor
) -> tuple[Array, Array, Array, *tuple[Array, ...]]:
    """A decode step's x [N, D] times weight [H, X, D], the first W channels of every head of it
    behind a short convolution [N, H, W], and the pool of windows; then the results of factors."""
    rows, norm = _rows(x, x.ndim - 1)
    first = Factor(weight[None])
    products = [_product(first)._replace(window=window), *map(_product, factors)]
    y, convolved, pool, *others = skinny_matmuls(rows, products, norm)
    convolved = convolved.reshape(x.shape[0], *window.weights.shape[:-1])
    (y,) = _shaped((y,), x, (first,))
    return y, convolved, pool, *_shaped(others, x, factors)


def _product(factor: Factor) -> Product:
    return Product(_matrices(factor.weights, factor.weights.ndim - 2), dtype=factor.dtype)


def _shaped(found: Sequence[Array], x: Array | Normed, factors: Sequence[Factor]) -> Any:
    shapes = [f.weights.shape[1:-1] for f in factors for _ in range(f.weights.shape[0])]
    return tuple(y.reshape(*x.shape[:-1], *s) for y, s in zip(found, shapes, strict=True))


def gated_project(
    x: Array | Normed,
    weight: Array,
    activation: Callable[[Array, Array], Array],
    count: Array | None = None,
) -> Array:
    """activation(x W_0, x W_1) in float32 for weight [2, *out, D], giving [..., *out].

    `count`: how many rows of a prefill are no padding; the others may come out as zeros.
    """
    matrices, shape = _matrices(weight, weight.ndim - 2), (*x.shape[:-1], *weight.shape[1:-1])
    if count is not None and x.shape[0] >= MANY_ROWS:
        return tiled_matmul(value_of(x), matrices, activation, count=count).reshape(shape)
    rows, norm = _rows(x, x.ndim - 1)
    return skinny_matmuls(rows, (Product(matrices, activation),), norm)[0].reshape(shape)


def reduce_project(
    x: Array, weight: Array, residual: Array | None = None, *, dtype: Any = None
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
        return skinny_matmuls(rows, (product,))[0].reshape(shape)
    partial = skinny_matmuls(rows, (Product(matrices, dtype=working_dtype(x)),))[0]
    out = lax.psum(partial.reshape(shape), AXIS).astype(dtype)
    return out if residual is None else out + residual


def _rows(x: Array | Normed, lead: int) -> tuple[Array, Any]:
    """x [*lead, *in] as a matrix, and the norm that is still to be applied to it."""
    norm = None
    if isinstance(x, Normed):
        x, norm = x.x, (x.weight, x.eps)
    return x.reshape(math.prod(x.shape[:lead]), -1), norm


def _matrices(weights: Array, outs: int) -> Array:
    """[G, *outs, *in] as G matrices."""
    return weights.reshape(weights.shape[0], math.prod(weights.shape[1 : 1 + outs]), -1)
