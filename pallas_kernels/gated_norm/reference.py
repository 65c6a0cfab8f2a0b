"""The op in plain XLA."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from ..precision import working_dtype
from ..skinny_matmul import rms_norm


def gated_rms_norm(
    o: Float[Array, "*N H V"],
    weight: Float[Array, " V"],
    gate: Float[Array, "*T Hk X"],
    first: int,
    eps: float,
    activation: Callable[[Array], Array],
    dtype: DTypeLike,
    start: int | Array | None = None,
) -> Float[Array, "*T H V"]:
    if start is not None:
        o = lax.dynamic_slice_in_dim(o, start, gate.shape[0])
    work = working_dtype(gate)
    normed = rms_norm(o.astype(work), weight, eps)
    gate = gate[..., first:].reshape(o.shape).astype(work)
    return (normed * activation(gate)).astype(dtype)
