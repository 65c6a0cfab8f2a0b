"""The ops as users call them: one function each, whichever implementation runs."""

from __future__ import annotations

from jax import Array, lax
from jaxtyping import Float, Int32

from ..ragged import Segments
from ..triton import Implementation, use_pallas
from . import decode, prefill, reference


def _choose(implementation: Implementation | None, v: Array, key_dim: int) -> bool:
    """True for Pallas. Asked for by name, a case the kernels do not cover is an error."""
    if not use_pallas(implementation):
        return False
    covered = prefill.supported(v, key_dim)
    if not covered and implementation == "pallas":
        raise NotImplementedError(
            f"key dim {key_dim}, value dim {v.shape[-1]}, {v.dtype}: the kernels take multiples "
            "of 16 up to 256 in bfloat16 or float32"
        )
    return covered


def ragged_gated_delta_rule(
    q: Float[Array, "T Hk K"],
    k: Float[Array, "T Hk K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H *Kg"],
    beta: Float[Array, "T H"],
    pool: Float[Array, "S L H K V"],
    layer: int,
    segments: Segments,
    *,
    chunk_size: int = 32,
    precision: lax.Precision = lax.Precision.HIGHEST,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H V"], Float[Array, "S L H K V"]]:
    """A packed ragged batch; states come from and go to slots of `pool[:, layer]`.

    `chunk_size` and `precision` are of the XLA form, whose chunks are short since every segment may
    waste most of one; the kernels choose theirs by dtype.
    """
    if _choose(implementation, v, k.shape[-1]):
        return prefill.ragged_prefill(q, k, v, g, beta, pool, layer, segments, interpret=interpret)
    return reference.ragged_gated_delta_rule(
        q, k, v, g, beta, pool, layer, segments, chunk_size=chunk_size, precision=precision
    )


def decode_gated_delta_rule(
    q: Float[Array, "N Hk K"],
    k: Float[Array, "N Hk K"],
    v: Float[Array, "N H V"],
    g: Float[Array, "N H *Kg"],
    beta: Float[Array, "N H"],
    pool: Float[Array, "S L H K V"],
    layer: int,
    slots: Int32[Array, " N"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N H V"], Float[Array, "S L H K V"]]:
    """One token for each of N sequences, whose states are updated in their slots."""
    if _choose(implementation, v, k.shape[-1]):
        return decode.decode(q, k, v, g, beta, pool, layer, slots, interpret=interpret)
    return reference.decode_gated_delta_rule(q, k, v, g, beta, pool, layer, slots)
