"""Rotary position embedding of the first dims of a head, half-split within those dims.

Multi-section rotary embeddings have one position per token for text, so they are this one.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from ..paged_attention import write_pages
from ..precision import working_dtype
from ..skinny_matmul import rms_norm

Norms = tuple[Array, Array]  # weights [D] float32 of queries and of keys


def angles(
    positions: Int32[Array, "*T"], rotary_dim: int, theta: float
) -> tuple[Float[Array, "*T R2"], Float[Array, "*T R2"]]:
    """Cosines and sines of p theta^(-2i/R), i < R/2."""
    half = rotary_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / max(half, 1)
    angle = positions[..., None].astype(jnp.float32) * jnp.float32(theta) ** -exponent
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "*T H D"], positions: Int32[Array, "*T"], rotary_dim: int, theta: float
) -> Float[Array, "*T H D"]:
    """Rotate pairs (i, i + R/2), i < R/2, of the first R = rotary_dim dims by p theta^(-2i/R)."""
    if rotary_dim == 0:
        return x
    half = rotary_dim // 2
    cos, sin = (y[..., None, :] for y in angles(positions, rotary_dim, theta))
    work = x.astype(working_dtype(x))
    first, second = work[..., :half], work[..., half:rotary_dim]
    rotated = [first * cos - second * sin, second * cos + first * sin, work[..., rotary_dim:]]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rotate_and_write(
    q: Float[Array, "T H G D"] | None,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv V"],
    norms: Norms | None,
    eps: float,
    positions: Int32[Array, " T"],
    rotary_dim: int,
    theta: float,
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv V"],
    layer: int | Array,
    kv_slots: Int32[Array, " T"],
) -> tuple[Array | None, Array, Array]:
    def turned(x: Array, which: int) -> Array:
        x = x if norms is None else rms_norm(x, norms[which], eps)
        return rotate(x, positions, rotary_dim, theta)

    keys = write_pages(keys, layer, turned(k, 1), kv_slots)
    values = write_pages(values, layer, v, kv_slots)
    return None if q is None else turned(q[:, :, 0], 0), keys, values
