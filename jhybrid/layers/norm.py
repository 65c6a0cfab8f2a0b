"""RMSNorm. Weights are plain multipliers; zero-centred ones become 1 + w when converted."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.precision import working_dtype


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """w x / sqrt(mean(x^2) + eps) over the last axis, in float32, cast back to x's dtype."""
    work = x.astype(working_dtype(x))
    variance = jnp.mean(work * work, axis=-1, keepdims=True)
    return (work * lax.rsqrt(variance + eps) * weight.astype(work.dtype)).astype(x.dtype)
