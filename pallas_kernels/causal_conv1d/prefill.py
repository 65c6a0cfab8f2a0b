"""Prefill of a packed ragged batch: one kernel over (channel block, tile of tokens).

Tiles do not cross a chain of segments, and are longer than a window: so only the first tile of a
chain reads the window in the pool. Its program also stores the windows at the ends of the chain's
segments, one of which may go to the very slot that it read; nobody else touches either.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Int32

from ..ragged import CONTINUE, NO_SLOT, Part, Segments, chain_end
from ..triton import triton_call
from .taps import Channels, silu_sum
from .tuning import ConvTuning


class ChainTiles(NamedTuple):
    """Tiles of up to `rows` tokens. Chains begin and end at segments; the rows of padding behind
    the last segment make one more."""

    start: Int32[Array, " N"]  # packed index of the tile's first token
    rows: Int32[Array, " N"]  # tokens in it
    chain: Int32[Array, " N"]  # the chain's first segment, if it is the chain's first tile; or -1
    load: Int32[Array, " N"]  # the slot to read, if it is the chain's first tile and reads one
    behind: Int32[Array, " G2"]  # of a chain's first segment: the segment behind its last


def make_chain_tiles(segments: Segments, size: int, rows: int) -> ChainTiles:
    count = segments.load.shape[0] + 1
    begin = segments.cu
    behind = jnp.append(chain_end(segments), jnp.int32(count))
    starts_chain = jnp.append(segments.load != CONTINUE, True)
    length = jnp.append(segments.cu, jnp.int32(size))[behind] - begin
    # A chain without tokens has a tile too: its window passes from slot to slot.
    tiles = jnp.where(starts_chain, jnp.maximum(-(-length // rows), 1), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(-(-size // rows) + count, dtype=jnp.int32)
    chain = jnp.sum(ends[:-1] <= index[:, None], axis=1, dtype=jnp.int32)
    number = index - (ends - tiles)[chain]
    used = index < ends[-1]
    offset = number * rows
    first = used & (number == 0)
    load = jnp.append(segments.load, jnp.int32(NO_SLOT))
    return ChainTiles(
        start=jnp.where(used, begin[chain] + offset, 0),
        rows=jnp.where(used, jnp.clip(length[chain] - offset, 0, rows), 0),
        chain=jnp.where(first, chain, -1),
        load=jnp.where(first, load[chain], NO_SLOT),
        behind=behind,
    )


def _kernel(
    place_ref: Any,
    cu_ref: Any,
    store_ref: Any,
    start_ref: Any,
    rows_ref: Any,
    chain_ref: Any,
    load_ref: Any,
    behind_ref: Any,
    x_ref: Any,
    weight_ref: Any,
    pool_ref: Any,
    others_ref: Any,
    y_ref: Any,
    new_pool_ref: Any,
    *,
    tuning: ConvTuning,
    interpret: bool,
) -> None:
    block, tile = pl.program_id(0), pl.program_id(1)
    width = weight_ref.shape[2] - 1
    channels = Channels(block, tuning.channels, weight_ref)
    start, rows, chain = start_ref[tile], rows_ref[tile], chain_ref[tile]
    layer, first_row, first = place_ref[0], place_ref[1], chain >= 0
    segment, slot = jnp.maximum(chain, 0), load_ref[tile]

    def row(token: Array, valid: Array) -> Array:
        return channels.load(x_ref, jnp.maximum(token, 0), valid=valid)

    def of_window(r: int) -> Array:
        at = jnp.maximum(slot, 0), layer, jnp.int32(r)
        return channels.load(pool_ref, *at, valid=slot >= 0).astype(x_ref.dtype)

    # Loads that wait for nothing but the tile come first, before any store could hold them up.
    window = [of_window(r) for r in range(width)]
    before = [row(start - width + r, ~first & (rows > 0)) for r in range(width)]
    weights = channels.weights(weight_ref)

    def end_of_segment(segment: Array, carry: Array) -> Array:
        """The last inputs before its end; where there are fewer, the window moved along."""
        slot, end = store_ref[segment], cu_ref[segment + 1]

        @pl.when(slot >= 0)
        def _() -> None:
            for r in range(width):
                token = end - width + r
                value = row(token, token >= start)
                for moved in range(r, width):
                    value = jnp.where(end - start == moved - r, window[moved], value)
                channels.store(new_pool_ref, slot, layer, jnp.int32(r), value=value)

        return carry

    last = jnp.where(first & (chain < store_ref.shape[0]), behind_ref[segment], segment)
    lax.fori_loop(segment, last, end_of_segment, jnp.int32(0))

    history = tuple(jnp.where(first, w, b) for w, b in zip(window, before, strict=True))

    def some_rows(step: Array, history: tuple[Array, ...]) -> tuple[Array, ...]:
        numbers = [step * tuning.unrolled + r for r in range(tuning.unrolled)]
        inputs = [*history, *(row(start + n, n < rows) for n in numbers)]
        for r, n in enumerate(numbers):
            y = silu_sum(inputs[r : r + width + 1], weights, interpret)
            channels.store(y_ref, first_row + start + n, value=y, valid=n < rows)
        return tuple(inputs[tuning.unrolled :])

    steps = lax.div(rows + (tuning.unrolled - 1), jnp.int32(tuning.unrolled))
    lax.fori_loop(jnp.int32(0), steps, some_rows, history)


def ragged_prefill(
    x: Array,
    weight: Array,
    pool: Array,
    layer: int | Array,
    segments: Segments,
    into: Part | None = None,
    *,
    tuning: ConvTuning | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`ragged_causal_conv1d` as a kernel; the pool is updated in place when donated."""
    tuning, heads, per_head = (tuning or ConvTuning.prefill(x.shape[0])).cut(weight)
    tiles = make_chain_tiles(segments, x.shape[0], tuning.rows)
    windows = pool.reshape(*pool.shape[:3], heads, -1)
    into = into or Part(x.shape[0], 0, None)
    out, others = (into.size, *weight.shape[:2]), into.others
    others = others if others is None else others.reshape(out)
    call = triton_call(
        functools.partial(_kernel, tuning=tuning, interpret=interpret),
        "causal_conv1d_prefill",
        (heads * per_head, tiles.start.shape[0]),
        (jax.ShapeDtypeStruct(out, x.dtype), jax.ShapeDtypeStruct(windows.shape, pool.dtype)),
        warps=tuning.warps,
        aliases={10: 1} if others is None else {10: 1, 11: 0},
        interpret=interpret,
    )
    place = jnp.asarray([layer, into.first], jnp.int32)
    y, windows = call(place, segments.cu, segments.store, *tiles, x, weight, windows, others)
    return y, windows.reshape(pool.shape)
