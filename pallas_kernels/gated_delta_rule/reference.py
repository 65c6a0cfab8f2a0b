"""The gated delta rule in plain XLA: token by token, in chunks, and over ragged batches.

State S [K, V] per value head, log-decay g <= 0 per head (GDN) or per key channel (KDA):

    S <- exp(g) S;   u = v - S^T k;   S <- S + k (beta u)^T;   o = S^T q

Queries and keys are l2-normalised here and queries scaled, as every model that uses the rule
does. All arithmetic is float32 (float64 when the inputs are).
"""

from __future__ import annotations

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from ..ragged import CONTINUE, Segments, gather_slots, make_tiles, scatter_slots

L2_EPS = 1e-6


def l2_normalize(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def _prepare(q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, ...]:
    """Everything in one working dtype, q and k normalised, q scaled by K**-0.5."""
    work = jnp.float64 if v.dtype == jnp.float64 else jnp.float32
    q, k, v, g, beta = (x.astype(work) for x in (q, k, v, g, beta))
    return l2_normalize(q) * (q.shape[-1] ** -0.5), l2_normalize(k), v, g, beta


def recurrent_gated_delta_rule(
    q: Float[Array, "T Hk K"],
    k: Float[Array, "T Hk K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H *Kg"],
    beta: Float[Array, "T H"],
    initial_state: Float[Array, "H K V"] | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "H K V"]]:
    """One sequence, token by token. The oracle of every other form."""
    q, k, v, g, beta = _prepare(q, k, v, g, beta)
    heads = v.shape[1]
    if initial_state is None:
        initial_state = jnp.zeros((heads, k.shape[-1], v.shape[-1]), v.dtype)

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        return _token_step(state, *token)

    state, o = lax.scan(step, initial_state.astype(v.dtype), (q, k, v, g, beta))
    return o, state


def _token_step(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array
) -> tuple[Array, Array]:
    """state [H, K, V]; q, k [Hk, K]; v [H, V]; g [H] or [H, K]; beta [H]."""
    group = v.shape[0] // k.shape[0]
    q, k = (jnp.repeat(x, group, axis=0) for x in (q, k))
    state = state * jnp.exp(g if g.ndim == 2 else g[:, None])[:, :, None]
    u = v - jnp.sum(state * k[:, :, None], axis=1)
    state = state + k[:, :, None] * (beta[:, None] * u)[:, None, :]
    return state, jnp.sum(state * q[:, :, None], axis=1)


def _segment_sums(g: Float[Array, "H C"]) -> Float[Array, "H C C"]:
    """[i, j] = g_{j+1} + ... + g_i for i >= j, else -inf.

    Summed over the short range itself: the difference of two long cumulative sums cancels.
    """
    size = g.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    terms = jnp.where(row > column, g[:, :, None], 0)
    return jnp.where(row >= column, jnp.cumsum(terms, axis=1), -jnp.inf)


def _halving_masks(size: int) -> list[Array]:
    """Level l: pairs (i, j) of one block of 2^(l+1), i in its upper half and j in its lower."""
    i, j = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    return [
        ((i >> level) & 1 == 1) & ((j >> level) == (i >> level) - 1)
        for level in range(int(math.log2(size)))
    ]


def _decayed_products_per_channel(
    q: Float[Array, "H C K"],
    k: Float[Array, "H C K"],
    g: Float[Array, "H C K"],
    precision: lax.Precision,
) -> tuple[Array, Array]:
    """sum_c x_ic k_jc exp(g_{j+1,c} + ... + g_{i,c}) for x = k (i > j) and x = q (i >= j).

    Halving: a pair's range is cut at the block border between i and j, so both exponents are
    sums of log-decays and never positive, whatever the decay.
    """
    heads, size, width = k.shape
    kk = jnp.zeros((heads, size, size), k.dtype)
    qk = jnp.eye(size, dtype=k.dtype) * jnp.sum(q * k, axis=-1)[:, :, None]
    for level, mask in enumerate(_halving_masks(size)):
        blocks = g.reshape(heads, size >> level, 1 << level, width)
        upto = jnp.cumsum(blocks, axis=2)
        rows = jnp.exp(upto).reshape(g.shape)
        columns = jnp.exp(jnp.sum(blocks, axis=2, keepdims=True) - upto).reshape(g.shape)
        for_block = k * columns
        kk += jnp.where(
            mask, jnp.einsum("hik,hjk->hij", k * rows, for_block, precision=precision), 0
        )
        qk += jnp.where(
            mask, jnp.einsum("hik,hjk->hij", q * rows, for_block, precision=precision), 0
        )
    return kk, qk


def unit_lower_inverse(a: Float[Array, "H C C"], precision: lax.Precision) -> Array:
    """(I + a)^-1 for strictly lower triangular a, with a derivative of its own."""
    return cast(Array, _inverse(a, precision))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _inverse(a: Array, precision: lax.Precision) -> Array:
    """By doubling the inverted diagonal blocks."""
    size = a.shape[-1]

    def double(inverse: Array, mask: Array) -> tuple[Array, None]:
        correction = jnp.matmul(jnp.where(mask, a, 0), inverse, precision=precision)
        return inverse - jnp.matmul(inverse, correction, precision=precision), None

    start = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    inverse, _ = lax.scan(double, start, jnp.stack(_halving_masks(size)))
    return inverse


def _inverse_forward(a: Array, precision: lax.Precision) -> tuple[Array, Array]:
    inverse = cast(Array, _inverse(a, precision))
    return inverse, inverse


def _inverse_backward(precision: lax.Precision, inverse: Array, cotangent: Array) -> tuple[Array]:
    return (inverse_cotangent(inverse, cotangent, precision),)


def inverse_cotangent(
    inverse: Float[Array, "H C C"], cotangent: Float[Array, "H C C"], precision: lax.Precision
) -> Float[Array, "H C C"]:
    """Of a, from that of X^-1 = (I + a)^-1, since d(X^-1) = -X^-1 dX X^-1: two products, where the
    doubling itself would cost 24."""
    transposed = jnp.swapaxes(inverse, -1, -2)
    inner = jnp.matmul(cotangent, transposed, precision=precision)
    return -jnp.tril(jnp.matmul(transposed, inner, precision=precision), -1)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _chunk_terms(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, precision: lax.Precision
) -> tuple[Array, ...]:
    """What a chunk contributes, whatever the state before it.

    q, k [C, Hk, K]; v [C, H, V]; g [C, H] or [C, H, K]; beta [C, H]. Returns, per value head,
    U [H,C,V], W [H,C,K], P [H,C,C], decayed q [H,C,K], decayed k [H,C,K], decay [H,K or 1].
    """
    group = v.shape[1] // k.shape[1]
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))
    g, beta = jnp.swapaxes(g, 0, 1), beta.T
    if g.ndim == 2:
        decay = jnp.exp(_segment_sums(g))  # [H, C, C]
        kk = jnp.repeat(jnp.einsum("hik,hjk->hij", k, k, precision=precision), group, axis=0)
        qk = jnp.repeat(jnp.einsum("hik,hjk->hij", q, k, precision=precision), group, axis=0)
        kk, qk = jnp.tril(kk * decay, -1), qk * decay
        from_start = jnp.exp(jnp.cumsum(g, axis=1))[..., None]
        to_end = decay[:, -1, :, None]
        q, k = jnp.repeat(q, group, axis=0), jnp.repeat(k, group, axis=0)
    else:
        kk, qk = _decayed_products_per_channel(q, k, g, precision)
        from_start = jnp.exp(jnp.cumsum(g, axis=1))
        after = jnp.cumsum(jnp.flip(g, axis=1), axis=1)  # sums from the end: no cancellation
        after = jnp.flip(jnp.pad(after, ((0, 0), (1, 0), (0, 0)))[:, :-1], axis=1)
        to_end = jnp.exp(after)
    solve = unit_lower_inverse(beta[:, :, None] * kk, precision)
    u = jnp.matmul(solve, beta[:, :, None] * v, precision=precision)
    w = jnp.matmul(solve, beta[:, :, None] * (k * from_start), precision=precision)
    return u, w, qk, q * from_start, k * to_end, from_start[:, -1]


def _chunk_step(
    state: Float[Array, "H K V"], terms: tuple[Array, ...], precision: lax.Precision
) -> tuple[Array, Array]:
    """The state after a chunk and its outputs [C, H, V]."""
    u, w, qk, q, k, decay = terms
    new = u - jnp.matmul(w, state, precision=precision)
    o = jnp.matmul(q, state, precision=precision) + jnp.matmul(qk, new, precision=precision)
    state = state * decay[:, :, None] + jnp.einsum("hck,hcv->hkv", k, new, precision=precision)
    return state, jnp.swapaxes(o, 0, 1)


def chunk_gated_delta_rule(
    q: Float[Array, "T Hk K"],
    k: Float[Array, "T Hk K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H *Kg"],
    beta: Float[Array, "T H"],
    initial_state: Float[Array, "H K V"] | None = None,
    *,
    chunk_size: int = 64,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "T H V"], Float[Array, "H K V"]]:
    """One sequence of any length in chunks; differentiable, and vmappable over a batch."""
    out_dtype, length = v.dtype, v.shape[0]
    q, k, v, g, beta = _prepare(q, k, v, g, beta)
    pad = -length % chunk_size

    def chunks(x: Array) -> Array:  # padding has k = v = g = beta = 0: the state passes through
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk_size, *x.shape[1:])

    terms = jax.vmap(functools.partial(_chunk_terms, precision=precision))(
        *map(chunks, (q, k, v, g, beta))
    )
    if initial_state is None:
        initial_state = jnp.zeros((v.shape[1], k.shape[-1], v.shape[-1]), v.dtype)
    state, o = lax.scan(
        lambda s, t: _chunk_step(s, t, precision), initial_state.astype(v.dtype), terms
    )
    o = o.reshape(-1, *o.shape[2:])[:length]
    return o.astype(out_dtype), state


def ragged_gated_delta_rule(
    q: Float[Array, "T Hk K"],
    k: Float[Array, "T Hk K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H *Kg"],
    beta: Float[Array, "T H"],
    pool: Float[Array, "S L H K V"],
    layer: int | Array,
    segments: Segments,
    *,
    chunk_size: int = 32,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "T H V"], Float[Array, "S L H K V"]]:
    """A packed ragged batch; states come from and go to slots of `pool[:, layer]`.

    Chunks are short, since every segment may waste most of one.
    """
    out_dtype, length = v.dtype, v.shape[0]
    q, k, v, g, beta = _prepare(q, k, v, g, beta)
    tiles = make_tiles(segments.cu, length, chunk_size, keep_empty=segments.store >= 0)
    starts = gather_slots(pool, segments.load, layer).astype(v.dtype)

    def cells(x: Array) -> Array:
        mask = tiles.valid.reshape(tiles.valid.shape + (1,) * (x.ndim - 1))
        return jnp.where(mask, x[tiles.tokens], 0)

    terms = jax.vmap(functools.partial(_chunk_terms, precision=precision))(
        *map(cells, (q, k, v, g, beta))
    )

    def step(carry: tuple[Array, Array], tile: tuple) -> tuple[tuple[Array, Array], Array]:
        state, ends = carry
        segment, first, tile_terms = tile
        fresh = first & (segments.load[segment] != CONTINUE)
        state = jnp.where(fresh, starts[segment], state)
        state, o = _chunk_step(state, tile_terms, precision)
        return (state, ends.at[segment].set(state)), o  # the last tile of a segment stays

    carry = (jnp.zeros_like(starts[0]), starts)
    (_, ends), o = lax.scan(step, carry, (tiles.segment, tiles.first, terms))
    o = o.reshape(-1, *o.shape[2:])[tiles.cell_of_token]
    return o.astype(out_dtype), scatter_slots(pool, segments.store, layer, ends)


def decode_gated_delta_rule(
    q: Float[Array, "N Hk K"],
    k: Float[Array, "N Hk K"],
    v: Float[Array, "N H V"],
    g: Float[Array, "N H *Kg"],
    beta: Float[Array, "N H"],
    pool: Float[Array, "S L H K V"],
    layer: int | Array,
    slots: Array,
) -> tuple[Float[Array, "N H V"], Float[Array, "S L H K V"]]:
    """One token for each of N sequences, whose states are updated in their slots."""
    out_dtype = v.dtype
    q, k, v, g, beta = _prepare(q, k, v, g, beta)
    states = gather_slots(pool, slots, layer).astype(v.dtype)
    states, o = jax.vmap(_token_step)(states, q, k, v, g, beta)
    return o.astype(out_dtype), scatter_slots(pool, slots, layer, states)
