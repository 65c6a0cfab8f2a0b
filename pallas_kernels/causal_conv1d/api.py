"""The ops as users call them: one function each, whichever implementation runs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from ..ragged import Segments
from ..triton import Implementation, use_pallas
from . import decode, prefill, reference


def _choose(implementation: Implementation | None, x: Array) -> bool:
    """True for Pallas. Asked for by name, a case the kernels do not cover is an error."""
    if not use_pallas(implementation):
        return False
    covered = x.dtype in (jnp.bfloat16, jnp.float32)
    if not covered and implementation == "pallas":
        raise NotImplementedError(f"x is {x.dtype}: the kernels take bfloat16 or float32")
    return covered


def ragged_causal_conv1d(
    x: Float[Array, "T C"],
    weight: Float[Array, "C J"],
    pool: Float[Array, "S L W C"],
    layer: int,
    segments: Segments,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T C"], Float[Array, "S L W C"]]:
    """A packed ragged batch; windows (W = J - 1 inputs) come from and go to slots of the pool."""
    if _choose(implementation, x):
        return prefill.ragged_prefill(x, weight, pool, layer, segments, interpret=interpret)
    return reference.ragged_causal_conv1d(x, weight, pool, layer, segments)


def decode_causal_conv1d(
    x: Float[Array, "N C"],
    weight: Float[Array, "C J"],
    pool: Float[Array, "S L W C"],
    layer: int,
    slots: Int32[Array, " N"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N C"], Float[Array, "S L W C"]]:
    """One token for each of N sequences, whose windows are shifted in their slots."""
    if _choose(implementation, x):
        return decode.decode(x, weight, pool, layer, slots, interpret=interpret)
    return reference.decode_causal_conv1d(x, weight, pool, layer, slots)
