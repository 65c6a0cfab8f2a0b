"""The ops as users call them: one function each, whichever implementation runs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from ..ragged import Segments, owner
from ..triton import Implementation, use_pallas
from . import decode, prefill, reference, short_prefill
from .inputs import SOFTPLUS, Activation, Gates, unpack, value_dim_of


def choose_pallas(implementation: Implementation | None, qkv: Array, pool: Array) -> bool:
    """True for Pallas. Asked for by name, a case the kernels do not cover is an error."""
    heads, key_dim, value_dim = pool.shape[2:]
    found = value_dim_of(qkv, key_dim, heads)
    if found != value_dim:
        raise ValueError(f"qkv holds values of {found} channels; the pool's have {value_dim}")
    if not use_pallas(implementation):
        return False
    covered = prefill.supported(qkv.dtype, key_dim, value_dim)
    if not covered and implementation == "pallas":
        raise NotImplementedError(
            f"key dim {key_dim}, value dim {value_dim}, {qkv.dtype}: the kernels take multiples "
            "of 16 up to 256 in bfloat16 or float32"
        )
    return covered


def ragged_gated_delta_rule(
    qkv: Float[Array, "T Hk W"],
    gates: Gates,
    pool: Float[Array, "S L H K V"],
    layer: int | Array,
    segments: Segments,
    *,
    activation: Activation = SOFTPLUS,
    chunk_size: int = 32,
    precision: lax.Precision = lax.Precision.HIGHEST,
    sequences: int | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H V"], Float[Array, "S L H K V"]]:
    """A packed ragged batch; states come from and go to slots of `pool[:, layer]`.

    `qkv` holds for each key head its query, its key and the values of its group. With a `layer` for
    each segment, `A_log` and `dt_bias` are of all layers of the pool, [L, H] and [L, H, *K].
    `chunk_size` and `precision` are of the XLA form, whose chunks are short since every segment may
    waste most of one; the kernels choose theirs by dtype. `sequences` is the most that the segments
    belong to (None: one each), by which the kernels are cut; results do not depend on it.
    """
    layers = jnp.broadcast_to(jnp.asarray(layer, jnp.int32), segments.load.shape)
    several = gates.A_log.ndim > 1
    if choose_pallas(implementation, qkv, pool):
        one = gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])
        sets, chosen = (gates, layers) if several else (one, None)
        args = (qkv, sets, pool, layers, chosen, segments, activation)
        if qkv.shape[0] <= short_prefill.MOST_TOKENS:
            return short_prefill.short_prefill(*args, interpret=interpret)
        o, pool = prefill.ragged_prefill(*args, sequences=sequences, interpret=interpret)
        assert o is not None
        return o, pool
    if several:
        of_token = layers[owner(segments.cu, qkv.shape[0])]
        gates = gates._replace(A_log=gates.A_log[of_token], dt_bias=gates.dt_bias[of_token])
    five = unpack(qkv, gates, pool.shape[3], activation)
    return reference.ragged_gated_delta_rule(
        *five, pool, layer, segments, chunk_size=chunk_size, precision=precision
    )


def decode_gated_delta_rule(
    qkv: Float[Array, "N Hk W"],
    gates: Gates,
    pool: Float[Array, "S L H K V"],
    layer: int | Array,
    slots: Int32[Array, " N"],
    *,
    activation: Activation = SOFTPLUS,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N H V"], Float[Array, "S L H K V"]]:
    """One token for each of N sequences, whose states are updated in their slots."""
    if choose_pallas(implementation, qkv, pool):
        return decode.decode(qkv, gates, pool, layer, slots, activation, interpret=interpret)
    five = unpack(qkv, gates, pool.shape[3], activation)
    return reference.decode_gated_delta_rule(*five, pool, layer, slots)
