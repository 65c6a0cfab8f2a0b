"""The ops as users call them, whichever implementation runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from ..causal_conv1d import decode_causal_conv1d
from ..triton import Implementation, use_pallas
from . import kernel, reference
from .reference import Product, Window


def skinny_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Callable[..., Array] | None = None,
    dtype: DTypeLike | None = None,
    norm: reference.Norm | None = None,
    residual: Float[Array, "M N"] | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """One result, see `skinny_matmuls`."""
    if combine is None and weights.shape[0] != 1:
        raise ValueError(f"{weights.shape[0]} weight matrices and nothing to combine them")
    one = (Product(weights, combine, dtype, residual),)
    return skinny_matmuls(x, one, norm, implementation=implementation, interpret=interpret)[0]


def skinny_matmuls(
    x: Float[Array, "M K"],
    products: Sequence[Product],
    norm: reference.Norm | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """combine(x W_1^T, ..., x W_G^T) + residual of each product. A product without `combine` has G
    results in a row; one with a window three, its last one the pool, which is updated in place when
    donated. With `norm` (weight [K], eps) the rows of x are RMS-normalised first.

    The kernel keeps products, combination and residual in float32 and rounds once, at the end. The
    reference rounds to x's type before it combines (to the result's where nothing is combined), and
    once more when it adds the residual. Normalised rows are rounded to x's type, but for those of
    up to 8 rows where the kernel applies the norm itself: then, if anything, x times the weight.

    The kernel takes up to 32 rows of bfloat16, and no row's result depends on the values of the
    others; by name, another case is an error. float32 goes to the reference, whose products have
    JAX's default precision.
    """
    run: Any = reference.skinny_matmuls
    if use_pallas(implementation):
        covered = kernel.supported(x, products)
        if implementation == "pallas" and not covered:
            raise NotImplementedError(
                f"x {x.shape} {x.dtype}, weights {[p.weights.shape for p in products]}: the kernel "
                f"takes up to {kernel.MAX_ROWS} rows of {jnp.bfloat16.__name__} and dims in "
                "multiples of 16"
            )
        if covered:
            run = functools.partial(kernel.skinny_matmuls, interpret=interpret)
            if kernel.convolves(x, products, norm):
                return run(x, products, norm)
    found, results = run(x, [p._replace(window=None) for p in products], norm), list[Array]()
    for product in products:
        results += found[: product.results]
        if product.window is not None:
            results += _convolved(found[0], product.window, implementation, interpret)
        found = found[product.results :]
    return tuple(results)


def _convolved(
    y: Float[Array, "M N"], window: Window, implementation: Implementation | None, interpret: bool
) -> tuple[Float[Array, "M C"], Float[Array, "S L J1 C"]]:
    heads = y.reshape(y.shape[0], window.weights.shape[0], -1)
    options: Any = {"implementation": implementation, "interpret": interpret}
    out, pool = decode_causal_conv1d(heads, *window, **options)
    return out.reshape(y.shape[0], -1), pool
