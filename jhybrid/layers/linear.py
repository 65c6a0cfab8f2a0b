"""Matrix products of the layers: weights are [out..., in...], partial sums meet over `tp`."""

from __future__ import annotations

from typing import Any

from jax import Array, lax

from pallas_kernels.precision import working_dtype

from ..sharding import AXIS


def project(x: Array, weight: Array, *, dtype: Any = None) -> Array:
    """x [..., D] times weight [*out, D], giving [..., *out] in `dtype` (default: x's)."""
    out = lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())),
        preferred_element_type=working_dtype(x),
    )
    return out.astype(dtype if dtype is not None else x.dtype)


def reduce_project(x: Array, weight: Array) -> Array:
    """x [..., *in] times weight [D, *in], giving [..., D], summed over the ranks' shares."""
    lead = x.ndim - (weight.ndim - 1)
    contract = (tuple(range(lead, x.ndim)), tuple(range(1, weight.ndim)))
    out = lax.dot_general(
        x,
        weight,
        (contract, ((), ())),
        preferred_element_type=working_dtype(x),
    )
    return lax.psum(out, AXIS).astype(x.dtype)
