"""Second kernel of a prefill: carry the state over the tiles of each chain of segments.

    new = U - W S;   o = s (q S) + P new;   S <- decay S + k^T (t new)

One program per (value block, value head, chain): everything a value block needs is in its own
columns of S. S stays in registers in float32; at the end of each segment it is stored to the
segment's slot. One more program clears the output rows behind the last segment.

All of this is linear in the values and the state. A chain is computed in units of its largest
value or initial state, so that float16 operands neither overflow (a unit-norm update adds at most
2 units to a column's norm) nor vanish.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..ragged import CONTINUE, Segments, TileRanges, chain_end
from ..triton import Dot, dividing_block, iota, power_of_two_blocks, triton_call
from .prepare import SMALLEST, Prepared
from .tuning import PrefillTuning

State = tuple[Array, ...]  # one array a block of key channels


def _kernel(
    layer_ref: Any,
    cu_ref: Any,
    load_ref: Any,
    store_ref: Any,
    end_ref: Any,
    tile_ref: Any,
    pool_ref: Any,
    u_ref: Any,
    w_ref: Any,
    p_ref: Any,
    value_size_ref: Any,
    decay_ref: Any,
    q_ref: Any,
    k_ref: Any,
    *refs: Any,
    per_channel: bool,
    tuning: PrefillTuning,
    interpret: bool,
) -> None:
    *row_scale_refs, o_ref, new_pool_ref = refs
    block, head, chain = (pl.program_id(axis) for axis in range(3))
    size, width = tuning.chunk, tuning.value_block
    key_head = head // (o_ref.shape[1] // k_ref.shape[1])
    layer = layer_ref[0]
    values = pl.ds(block * width, width)
    keys = [pl.ds(offset, wide) for offset, wide in power_of_two_blocks(pool_ref.shape[3])]
    dot = Dot(tuning.products, interpret)
    flip = tuning.transposed

    def turned(x: Array) -> Array:
        return x.T if flip else x

    def read_state() -> State:
        slot = load_ref[chain]
        mask = jnp.broadcast_to(slot >= 0, (1, 1))
        slot = jnp.maximum(slot, 0)
        return tuple(
            plt.load(pool_ref.at[slot, layer, head, part, values], mask=mask, other=0.0).astype(
                jnp.float32
            )
            for part in keys
        )

    def chain_unit(state: State) -> Array:
        """The largest of the chain's values and of its initial state."""
        begin, behind = tile_ref[chain], tile_ref[end_ref[chain]]

        def widen(step: Array, largest: Array) -> Array:
            index = begin + step * 128 + iota((128,), 0)
            part = pl.ds(begin + step * 128, 128)
            sizes = plt.load(value_size_ref.at[head, part], mask=index < behind, other=0.0)
            return jnp.maximum(largest, jnp.max(sizes))

        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(s)) for s in state))
        steps = lax.div(behind - begin + 127, jnp.int32(128))
        return lax.fori_loop(0, steps, widen, jnp.maximum(largest, SMALLEST))

    def write_state(segment: Array, state: State, unit: Array) -> None:
        slot = store_ref[segment]

        @pl.when(slot >= 0)
        def _() -> None:
            for part, s in zip(keys, state, strict=True):
                x = (turned(s) * unit).astype(new_pool_ref.dtype)
                new_pool_ref[slot, layer, head, part, values] = x

    def tile_step(segment: Array, tile: Array, state: State, unit: Array) -> State:
        token = cu_ref[segment] + (tile - tile_ref[segment]) * size
        valid = (token + iota((size,), 0) < cu_ref[segment + 1])[:, None]

        def of_state(ref: Any, head: Array) -> Array:
            """Sum over key blocks of a tile's rows [C, Kb] times the state, [C, V] or turned."""
            parts = (
                dot(s, ref[tile, head, :, part], tb=True)
                if flip
                else dot(ref[tile, head, :, part], s)
                for part, s in zip(keys, state, strict=True)
            )
            return functools.reduce(jnp.add, parts)

        u = u_ref[tile, head, :, values].astype(jnp.float32)
        new = turned(u) * (value_size_ref[head, tile] / unit) - of_state(w_ref, head)
        o = of_state(q_ref, key_head)
        p = p_ref[tile, head]
        scaled = new
        if not per_channel:
            q_scale, k_scale = (ref[tile, head] for ref in row_scale_refs)
            o = o * (q_scale[None, :] if flip else q_scale[:, None])
            scaled = new * (k_scale[None, :] if flip else k_scale[:, None])
        o = o + (dot(new, p, tb=True) if flip else dot(p, new))
        o = (turned(o) * unit).astype(o_ref.dtype)
        plt.store(o_ref.at[pl.ds(token, size), head, values], o, mask=valid)
        after = []
        for part, s in zip(keys, state, strict=True):
            if per_channel:
                decay = decay_ref[tile, head, part]
                decay = decay[None, :] if flip else decay[:, None]
            else:
                decay = decay_ref[tile, head]
            k = k_ref[tile, key_head, :, part]
            update = dot(scaled, k) if flip else dot(k, scaled, ta=True)
            after.append(s * decay + update)
        return tuple(after)

    start = read_state()
    unit = chain_unit(start)

    def segment_step(segment: Array, state: State) -> State:
        state = lax.fori_loop(
            tile_ref[segment],
            tile_ref[segment + 1],
            lambda tile, state: tile_step(segment, tile, state, unit),
            state,
        )
        write_state(segment, state, unit)
        return state

    scaled = tuple(turned(s) * (1.0 / unit) for s in start)
    lax.fori_loop(chain, end_ref[chain], segment_step, scaled)

    # Padding rows: cleared by the program of the chain behind the last, which has no segments.
    last = load_ref.shape[0] - 1
    begin, behind = cu_ref[last], o_ref.shape[0]
    blocks = lax.div(behind - begin + (size - 1), jnp.int32(size))

    def clear(step: Array, carry: Array) -> Array:
        token = begin + step * size
        valid = (token + iota((size,), 0) < behind)[:, None]
        zeros = jnp.zeros((size, width), o_ref.dtype)
        plt.store(o_ref.at[pl.ds(token, size), head, values], zeros, mask=valid)
        return carry

    lax.fori_loop(jnp.int32(0), jnp.where(chain == last, blocks, 0), clear, jnp.int32(0))


def scan(
    prepared: Prepared,
    pool: Array,
    layer: int | Array,
    segments: Segments,
    tiles: TileRanges,
    out: jax.ShapeDtypeStruct,
    tuning: PrefillTuning,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """Outputs [T, H, V] of `out`, and the pool with the states that segments store."""
    heads, value_dim = out.shape[1:]
    width = dividing_block(value_dim, tuning.value_block)
    inputs = [x for x in prepared if x is not None]
    load = jnp.pad(segments.load, (0, 1), constant_values=CONTINUE)
    end = jnp.pad(chain_end(segments), (0, 1), constant_values=segments.load.shape[0])
    call = triton_call(
        functools.partial(
            _kernel,
            per_channel=prepared.q_scale is None,
            tuning=tuning.with_value_block(width),
            interpret=interpret,
        ),
        "gated_delta_rule_scan",
        (value_dim // width, heads, load.shape[0]),
        (out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        warps=tuning.scan_warps,
        stages=tuning.scan_stages,
        aliases={6: 1},
        interpret=interpret,
    )
    layers = jnp.asarray([layer], jnp.int32)
    arrays = (layers, segments.cu, load, segments.store, end, tiles.of_segment, pool, *inputs)
    o, pool = call(*arrays)
    return o, pool
