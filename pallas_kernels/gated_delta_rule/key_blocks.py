"""Sums over the key channels of one token, in kernels that hold them as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from .reference import L2_EPS


def sum_all(blocks: Iterable[Array]) -> Array:
    return sum(jnp.sum(block) for block in blocks)  # pyright: ignore[reportReturnType]


def over_keys(state: Sequence[Array], x: Sequence[Array]) -> Array:
    """S^T x"""
    parts = [jnp.sum(s * y[:, None], axis=0) for s, y in zip(state, x, strict=True)]
    return sum(parts[1:], start=parts[0])


def l2_scales(q: Sequence[Array], k: Sequence[Array], key_dim: int) -> tuple[Array, Array]:
    """What normalises q, its 1 / sqrt(K) included, and k."""
    of_q = lax.rsqrt(sum_all(x * x for x in q) + L2_EPS) * key_dim**-0.5
    return of_q, lax.rsqrt(sum_all(x * x for x in k) + L2_EPS)
