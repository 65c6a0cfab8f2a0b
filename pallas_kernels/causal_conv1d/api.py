"""The ops as users call them: one function each, whichever implementation runs.

Inputs may be the first W channels of each of H heads [.., H, X], X >= W, as a projection leaves
them beside others: they are read where they are. Weights are then [H, W, J].
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from ..ragged import Part, Segments, put_part
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


def _by_head(x: Array, weight: Array) -> tuple[Array, Array]:
    """x [T, H, X] and weight [H, W, J], of one head where there are none."""
    return (x, weight) if x.ndim == 3 else (x[:, None], weight[None])


def ragged_causal_conv1d(
    x: Float[Array, "T *H X"],
    weight: Float[Array, "*H W J"],
    pool: Float[Array, "S L J1 C"],
    layer: int | Array,
    segments: Segments,
    *,
    into: Part | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N *H W"], Float[Array, "S L J1 C"]]:
    """A packed ragged batch; windows (J - 1 inputs of C = H W channels) come from and go to slots
    of the pool. N is T, or the size of the array `into` which the results are written."""
    if _choose(implementation, x):
        y, pool = prefill.ragged_prefill(
            *_by_head(x, weight), pool, layer, segments, into, interpret=interpret
        )
        return y.reshape(y.shape[0], *weight.shape[:-1]), pool
    y, pool = reference.ragged_causal_conv1d(x, weight, pool, layer, segments)
    return (y if into is None else put_part(y, into)), pool


def decode_causal_conv1d(
    x: Float[Array, "N *H X"],
    weight: Float[Array, "*H W J"],
    pool: Float[Array, "S L J1 C"],
    layer: int | Array,
    slots: Int32[Array, " N"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N *H W"], Float[Array, "S L J1 C"]]:
    """One token for each of N sequences, whose windows are shifted in their slots."""
    if _choose(implementation, x):
        y, pool = decode.decode(*_by_head(x, weight), pool, layer, slots, interpret=interpret)
        return y.reshape(x.shape[0], *weight.shape[:-1]), pool
    return reference.decode_causal_conv1d(x, weight, pool, layer, slots)
