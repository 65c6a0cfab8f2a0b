"""A long prompt alone, from its first token on: attention by cuDNN, over keys gathered from pages.

Such a step is the one where attention weighs most, and cuDNN is the faster there (see the notes in
eval/notes/paged_attention.md). It can't serve the rest: its causal mask starts at the first key, it
has no ragged batches, and merging its result with that of a prefix takes sums that JAX hands out in
bfloat16 only.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

LEAST_TOKENS = 4096  # below, a program of its own is not repaid


def covers(tokens: int, room: int, key_dim: int, value_dim: int, dtype: Any) -> bool:
    """Whether cuDNN takes so many queries on a Hopper GPU, and they are worth it. More tokens than
    a sequence has room for in its pages are never one prompt."""
    fits = value_dim == key_dim and key_dim % 8 == 0 and key_dim <= 256
    return fits and dtype == jnp.bfloat16 and LEAST_TOKENS <= tokens <= room


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
