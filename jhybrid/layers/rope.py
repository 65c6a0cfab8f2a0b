"""Rotary position embedding of the first dims of a head, half-split within those dims.

Multi-section rotary embeddings have one position per token for text, so they are this one.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels.precision import working_dtype


def rotate(
    x: Float[Array, "... H D"], positions: Int32[Array, ...], rotary_dim: int, theta: float
) -> Float[Array, "... H D"]:
    """Rotate pairs (i, i + R/2), i < R/2, of the first R = rotary_dim dims by p * theta^(-2i/R)."""
    if rotary_dim == 0:
        return x
    half = rotary_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / half
    frequency = jnp.float32(theta) ** -exponent
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    work = x.astype(working_dtype(x))
    first, second = work[..., :half], work[..., half:rotary_dim]
    rotated = [first * cos - second * sin, second * cos + first * sin, work[..., rotary_dim:]]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
