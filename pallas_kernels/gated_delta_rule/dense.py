"""The gated delta rule over equal rows from zero state, for training: differentiable and parallel.

All that a chunk does to any state is computed for all chunks at once (u, w and decayed q, k, as in
`reference`); what is sequential is a short recurrence over chunks that has kernels of its own,
forward and backward (`chunk_states`). Products may run in TF32: inputs are a training batch's.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from ..precision import working_dtype
from ..triton import Implementation
from .chunk_states import chunk_inverses, chunk_states
from .reference import l2_normalize

LEAF = 8  # tokens whose per-channel decays are taken from the leaf's middle
LEAF_LIMIT = 144.0 / LEAF  # log-decays there, so that no factor leaves the range of float32


def dense_gated_delta_rule(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H *Kg"],
    beta: Float[Array, "B T H"],
    *,
    chunk_size: int = 32,
    precision: lax.Precision = lax.Precision.DEFAULT,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H V"]:
    """Outputs at every token. Log-decays of a channel below -18 count as -18 between tokens of one
    leaf of 8: a factor below float32 rounding for another."""
    out_dtype, work = v.dtype, working_dtype(v)
    if work == jnp.float64:
        implementation = "xla"  # an oracle's
    how: Any = {"implementation": implementation, "interpret": interpret}
    rows, length, heads, _ = v.shape
    key_heads, key_dim = k.shape[2:]
    pad = -length % chunk_size

    def chunks(x: Array, count: int) -> Array:
        """[B, T, H', X] -> [B, Hk, N, G, C, X]; padding has k = v = g = beta = 0."""
        x = jnp.pad(x.astype(work), ((0, 0), (0, pad), (0, 0), (0, 0)))
        x = x.reshape(rows, -1, chunk_size, key_heads, count // key_heads, x.shape[-1])
        return jnp.transpose(x, (0, 3, 1, 4, 2, 5))

    def matmul(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=precision)

    q = chunks(l2_normalize(q.astype(work)) * key_dim**-0.5, key_heads)
    k = chunks(l2_normalize(k.astype(work)), key_heads)
    v, beta = chunks(v, heads), chunks(beta[..., None], heads)
    per_channel = g.ndim == 4
    g = chunks(g if per_channel else g[..., None], heads)
    upto = _running_sums(g)
    total = upto[..., -1:, :]
    row, column = jnp.arange(chunk_size)[:, None], jnp.arange(chunk_size)[None, :]
    if per_channel:
        kk, qk = _decayed_products(q, k, g, upto, precision)
    else:
        between = jnp.where(row >= column, upto - jnp.swapaxes(upto, -1, -2), -jnp.inf)
        decay = jnp.exp(jnp.minimum(between, 0))
        kk, qk = (matmul(x, jnp.swapaxes(k, -1, -2)) * decay for x in (k, q))
    solve = chunk_inverses(jnp.where(row > column, beta * kk, 0), precision, **how)
    from_start = jnp.exp(upto)
    u, w = matmul(solve, beta * v), matmul(solve, beta * from_start * k)
    decays = jnp.broadcast_to(jnp.exp(total[..., 0, :]), (*u.shape[:4], key_dim))
    to_end = k * jnp.exp(total - upto)
    states = chunk_states(w, to_end, u, decays, precision, **how)
    new = u - matmul(w, states)
    o = matmul(q * from_start, states) + matmul(jnp.where(row >= column, qk, 0), new)
    o = jnp.transpose(o, (0, 2, 4, 1, 3, 5)).reshape(rows, length + pad, heads, -1)
    return o[:, :length].astype(out_dtype)


def _running_sums(g: Float[Array, "*N C X"]) -> Float[Array, "*N C X"]:
    """Inclusive sums over a chunk, as a product: one pass over the array."""
    size = g.shape[-2]
    lower = jnp.tril(jnp.ones((size, size), g.dtype))
    return jnp.einsum("ij,...jx->...ix", lower, g, precision=lax.Precision.HIGHEST)


def _decayed_products(
    q: Array, k: Array, g: Array, upto: Array, precision: lax.Precision
) -> tuple[Array, Array]:
    """sum_c x_ic k_jc exp(g_{j+1,c} + ... + g_{i,c}) for x = k and x = q, where i >= j; anything
    above the diagonal.

    Level by level as in `channel_decay`: a pair's range is cut at the middle of a leaf, or at the
    block border between its tokens.
    """
    size, both = k.shape[-2], jnp.concatenate([k, q], axis=-2)

    def products(rows: Array, columns: Array, mask: Array) -> Array:
        twice = jnp.concatenate([rows, rows], axis=-2)
        pairs = jnp.matmul(both * twice, jnp.swapaxes(k * columns, -1, -2), precision=precision)
        return jnp.where(jnp.concatenate([mask, mask]), pairs, 0)

    i, j = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    floored = _running_sums(jnp.maximum(g, -LEAF_LIMIT))
    relative = floored - _of_blocks(floored, LEAF, LEAF // 2 - 1)
    # above the diagonal factors may multiply to infinity, and 0 times it is no derivative
    out = products(jnp.exp(relative), jnp.exp(-relative), (i // LEAF == j // LEAF) & (i >= j))
    half = LEAF
    while half < size:
        border = _of_blocks(upto, 2 * half, half - 1)
        decay = jnp.exp(-jnp.abs(upto - border))
        pair = (i // half == j // half + 1) & (j // half % 2 == 0)
        out += products(decay, decay, pair)
        half *= 2
    kk, qk = jnp.split(out, 2, axis=-2)
    return kk, qk


def _of_blocks(x: Float[Array, "*N C X"], block: int, place: int) -> Array:
    """Of each block of rows the one at `place`, at all of its rows."""
    *lead, size, width = x.shape
    blocks = x.reshape(*lead, size // block, block, width)
    chosen = jnp.broadcast_to(blocks[..., place : place + 1, :], blocks.shape)
    return chosen.reshape(x.shape)
