"""A long prompt alone, from its first token on: attention by cuDNN, over keys gathered from pages.

Such a step is the one where attention weighs most, and cuDNN is the faster there (see the notes in
eval/notes/paged_attention.md). It can't serve the rest: its causal mask starts at the first key, it
has no ragged batches, and merging its result with that of a prefix takes sums that JAX hands out in
bfloat16 only.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

LEAST_TOKENS = 4096  # below, the gather and the wait for the choice are not repaid


def covers(q: Array, values: Array, page_table: Array) -> bool:
    """Whether cuDNN takes these shapes on a Hopper GPU, and they are worth it.

    A batch of more tokens than a sequence has pages for is never one prompt alone.
    """
    tokens, room = q.shape[0], page_table.shape[1] * values.shape[2]
    if q.dtype != jnp.bfloat16 or tokens < LEAST_TOKENS or tokens > room:
        return False
    dim = q.shape[-1]
    return values.shape[-1] == dim and dim % 8 == 0 and dim <= 256


def one_whole_prompt(
    positions: Int32[Array, " T"], cu_seqlens: Int32[Array, " N1"]
) -> Bool[Array, ""]:
    """Whether the batch is its first sequence only, from position 0."""
    return (cu_seqlens[1] == cu_seqlens[-1]) & (positions[0] == 0)


def attend(
    q: Float[Array, "T Hq D"],
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv D"],
    layer: int | Array,
    cu_seqlens: Int32[Array, " N1"],
    page_table: Int32[Array, "N pages"],
    *,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "T Hq D"]:
    """The first sequence alone, all of whose tokens are queries."""
    tokens, size = q.shape[0], keys.shape[2]
    pages = jnp.maximum(page_table[0, : -(-tokens // size)], 0)
    length = cu_seqlens[1]
    known = (jnp.arange(tokens, dtype=jnp.int32) < length)[:, None, None]

    def rows(pool: Array) -> Array:
        """Pages hold anything behind the last token, which no key may be."""
        found = pool[pages, layer].reshape(-1, *pool.shape[3:])[:tokens]
        return jnp.where(known, found, 0)[None]

    lengths = length[None]
    o = jax.nn.dot_product_attention(
        q[None],
        rows(keys),
        rows(values),
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )
    return o[0]
