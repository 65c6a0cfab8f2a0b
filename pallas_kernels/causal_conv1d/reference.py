"""Depthwise causal convolution with a carried window, then silu, in plain XLA.

y[t, c] = silu(sum_j w[c, j] x[t - (J - 1) + j, c]); the window is the last J - 1 inputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from ..ragged import Segments, chain_start, gather_slots, owner, scatter_slots


def _flat(x: Array, weight: Array) -> tuple[Array, Array]:
    """x [.., C] and weight [C, J]: the first W channels of every head, end to end."""
    lead = x.shape[: x.ndim - (weight.ndim - 1)]
    x = x[..., : weight.shape[-2]]
    return x.reshape(*lead, -1), weight.reshape(-1, weight.shape[-1])


def _silu_sum(taps: list[Array], weight: Array, dtype: jnp.dtype) -> Array:
    total = sum(tap.astype(jnp.float32) * weight[:, j] for j, tap in enumerate(taps))
    return jax.nn.silu(jnp.asarray(total)).astype(dtype)


def dense_causal_conv1d(
    x: Float[Array, "B T *H X"], weight: Float[Array, "*H W J"]
) -> Float[Array, "B T *H W"]:
    """Equal-length sequences from their start, no window kept."""
    out = (*x.shape[:2], *weight.shape[:-1])
    x, weight = _flat(x, weight)
    size, length = weight.shape[1], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (size - 1, 0), (0, 0)))
    taps = [padded[:, j : j + length] for j in range(size)]
    return _silu_sum(taps, weight.astype(jnp.float32), x.dtype).reshape(out)


def ragged_causal_conv1d(
    x: Float[Array, "T *H X"],
    weight: Float[Array, "*H W J"],
    pool: Float[Array, "S L J1 C"],
    layer: int | Array,
    segments: Segments,
) -> tuple[Float[Array, "T *H W"], Float[Array, "S L J1 C"]]:
    out = (x.shape[0], *weight.shape[:-1])
    x, weight = _flat(x, weight)
    length, width = x.shape[0], weight.shape[1] - 1
    first = chain_start(segments)  # [G]
    windows = gather_slots(pool, segments.load, layer).astype(x.dtype)  # [G, W, C]

    def before(source: Array, segment: Array) -> Array:
        """Input at packed index `source`, from the window where that lies before the chain."""
        begin = segments.cu[first[segment]]
        inside = (source >= begin)[..., None]
        row = jnp.clip(width + source - begin, 0, width - 1)
        packed = x[jnp.clip(source, 0, length - 1)]
        return jnp.where(inside, packed, windows[first[segment], row])

    token = jnp.arange(length, dtype=jnp.int32)
    segment = owner(segments.cu, length)
    taps = [before(token - width + j, segment) for j in range(width)] + [x]
    y = _silu_sum(taps, weight.astype(jnp.float32), x.dtype)

    group = jnp.arange(segments.load.shape[0], dtype=jnp.int32)[:, None]
    source = segments.cu[1:, None] - width + jnp.arange(width, dtype=jnp.int32)
    ends = before(source, jnp.broadcast_to(group, source.shape))
    return y.reshape(out), scatter_slots(pool, segments.store, layer, ends)


def decode_causal_conv1d(
    x: Float[Array, "N *H X"],
    weight: Float[Array, "*H W J"],
    pool: Float[Array, "S L J1 C"],
    layer: int | Array,
    slots: Int32[Array, " N"],
) -> tuple[Float[Array, "N *H W"], Float[Array, "S L J1 C"]]:
    out = (x.shape[0], *weight.shape[:-1])
    x, weight = _flat(x, weight)
    window = gather_slots(pool, slots, layer).astype(x.dtype)  # [N, W, C]
    window = jnp.concatenate([window, x[:, None]], axis=1)
    taps = [window[:, j] for j in range(weight.shape[1])]
    y = _silu_sum(taps, weight.astype(jnp.float32), x.dtype)
    return y.reshape(out), scatter_slots(pool, slots, layer, window[:, 1:])
