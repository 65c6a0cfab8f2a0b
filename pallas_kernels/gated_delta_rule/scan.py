"""Second kernel of a prefill: carry the state over the tiles of each chain of segments.

    new = T (v - k' S);   o = q' S + P new;   S <- decay S + k''^T new

with k', q' decayed from the tile's start and k'' to its end. One program per (value block, value
head, chain): everything a value block needs is in its own columns of S. S stays in registers in
float32; at the end of each segment it is stored to the segment's slot. One more program clears
the output rows behind the last segment.

All of this is linear in the values and the state. A chain is computed in units of its largest
value or initial state, so that float16 operands neither overflow (a unit-norm update adds at most
2 units to a column's norm) nor vanish.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..ragged import Segments, TileRanges, chain_at, chain_end
from ..triton import Dot, dividing_block, iota, multiply_add, power_of_two_blocks, triton_call
from .tile import Options, Prepared

State = tuple[Array, ...]  # one array a block of key channels
SMALLEST = 1e-30  # a chain of zeros is divided by this


class _Inputs(NamedTuple):
    layer: Any  # [G] of each segment
    cu: Any  # [G1]
    load: Any
    store: Any
    end: Any
    tile: Any  # [G1] first tile of each segment
    pool: Any
    qkv: Any


class _Span(NamedTuple):
    """Of a segment, read before its first step."""

    origin: Array  # tile i starts at token origin + i C
    behind: Array  # the first token that is not in the segment


class _Chain:
    """A program: its chain of segments, and its block of values of a head."""

    def __init__(self, inputs: _Inputs, tiles: Prepared, o_ref: Any, options: Options, width: int):
        self.inputs, self.tiles, self.o_ref, self.options = inputs, tiles, o_ref, options
        self.block, self.head, self.chain = (pl.program_id(axis) for axis in range(3))
        self.segment, self.slot, self.behind = chain_at(self.chain, inputs.load, inputs.end)
        self.size, self.width = options.tuning.chunk, width
        self.flip = options.tuning.transposed
        self.turn_by_product = options.tuning.turn_by_product and self.flip
        heads, key_heads = tiles.t.shape[1], inputs.qkv.shape[1]
        self.per_channel = tiles.k_to_end is not None
        self.key_head = self.head // (heads // key_heads)
        self.keys = self.head if self.per_channel else self.key_head  # of the tiles of keys
        place = self.head % (heads // key_heads)
        first = 2 * options.key_dim + place * options.value_dim + self.block * width
        self.values_in = pl.ds(first, width)
        self.values = pl.ds(self.block * width, width)
        self.parts = [pl.ds(*block) for block in power_of_two_blocks(options.key_dim)]
        self.dot = Dot(options.tuning.products, options.interpret)

    def turned(self, x: Array) -> Array:
        return x.T if self.flip else x

    def of_rows(self, rows: Array, shape: tuple[int, ...]) -> Array:
        """Scales of rows [C] for [C, V], or [V, C]."""
        return jnp.broadcast_to(rows[None, :] if self.flip else rows[:, None], shape)

    def read_state(self) -> State:
        mask = jnp.broadcast_to(self.slot >= 0, (1, 1))
        at = jnp.maximum(self.slot, 0), self.inputs.layer[self.segment], self.head
        return tuple(
            plt.load(
                self.inputs.pool.at[(*at, part, self.values)], mask=mask, other=0.0
            ).astype(jnp.float32)
            for part in self.parts
        )  # fmt: skip

    def write_state(self, ref: Any, segment: Array, state: State, unit: Array) -> None:
        slot, layer = self.inputs.store[segment], self.inputs.layer[segment]

        @pl.when(slot >= 0)
        def _() -> None:
            for part, s in zip(self.parts, state, strict=True):
                x = (self.turned(s) * unit).astype(ref.dtype)
                ref[slot, layer, self.head, part, self.values] = x

    def unit(self, state: State) -> Array:
        """A power of two that no value of the chain, nor of its initial state, exceeds."""
        tile = self.inputs.tile
        begin, behind = tile[self.chain], tile[self.behind]

        def widen(step: Array, largest: Array) -> Array:
            index = begin + step * 128 + iota((128,), 0)
            at = self.tiles.value_size.at[self.head, pl.ds(begin + step * 128, 128)]
            sizes = plt.load(at, mask=index < behind, other=0.0)
            return jnp.maximum(largest, jnp.max(sizes))

        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(s)) for s in state))
        steps = lax.div(behind - begin + 127, jnp.int32(128))
        largest = lax.fori_loop(0, steps, widen, jnp.maximum(largest, SMALLEST))
        bits = lax.bitcast_convert_type(largest, jnp.int32)
        return lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)

    def span(self, segment: Array) -> _Span:
        inputs = self.inputs
        first, behind = inputs.cu[segment], inputs.cu[segment + 1]
        return _Span(first - inputs.tile[segment] * self.size, behind)

    def tokens(self, span: _Span, tile: Array) -> tuple[Any, Array]:
        """The rows of a tile, and which of them are the segment's."""
        token = span.origin + tile * self.size
        return pl.ds(token, self.size), (token + iota((self.size,), 0) < span.behind)[:, None]

    def decays_ahead(self, tile: Array) -> State:
        """KDA: of a tile, in registers. No product takes them, so no pipeline fetches them."""
        if not self.per_channel:
            return ()
        tile = jnp.minimum(tile, self.tiles.t.shape[0] - 1)
        return tuple(self.tiles.decay[tile, self.head, part] for part in self.parts)

    def decays(self, tile: Array, ahead: State) -> State:
        """Of the state over a tile, for each block of keys."""
        if self.per_channel:
            return tuple(d[None, :] if self.flip else d[:, None] for d in ahead)
        # Of its last row: in the L1 cache, where the pipeline's copy of the rows left its line.
        decay = self.tiles.from_start[tile, self.head, self.size - 1]
        return (decay,) * len(self.parts)

    def tile_step(
        self, span: _Span, unit: Array, tile: Array, carry: tuple[State, State]
    ) -> tuple[State, State]:
        """Whatever it reads feeds a product, so that the compiler's pipeline has fetched it tiles
        ago. Any other load is waited for within the step, often by an instruction that has nothing
        to do with it: there are six flags to wait for, shared by all loads on their way."""
        state, ahead = carry
        tiles, dot, flip = self.tiles, self.dot, self.flip
        rows, valid = self.tokens(span, tile)
        following = self.decays_ahead(tile + 1)

        def of_state(rows: list[Array]) -> Array:
            """Sum over key blocks of a tile's rows [C, Kb] times the state, [C, V] or turned."""
            parts = (
                dot(s, x, tb=True) if flip else dot(x, s)
                for x, s in zip(rows, state, strict=True)
            )  # fmt: skip
            return functools.reduce(jnp.add, parts)

        def of_tokens(square: Array, x: Array) -> Array:
            return dot(x, square, tb=True) if flip else dot(square, x)

        def key_tile(ref: Any) -> list[Array]:
            return [ref[tile, self.keys, :, part] for part in self.parts]

        k = key_tile(tiles.k)
        known = of_state(k)
        at = self.inputs.qkv.at[rows, self.key_head, self.values_in]
        v = plt.load(at, mask=valid, other=0.0)
        if self.turn_by_product:
            diagonal = iota((self.size, self.size), 0) == iota((self.size, self.size), 1)
            scaled = jnp.where(diagonal, 1.0 / unit, 0.0).astype(jnp.bfloat16)  # exact
            v = Dot("bf16", self.options.interpret)(v, scaled, ta=True)
        else:
            v = self.turned(v).astype(jnp.float32) * (1.0 / unit)
        # Sums of a product and something known before it cost nothing: it starts from that.
        from_start = None if self.per_channel else tiles.from_start[tile, self.head]
        if from_start is None:
            rest = v - known
        else:
            scale = self.of_rows(-from_start, known.shape)
            rest = multiply_add(known, scale, v, self.options.interpret)
        new = of_tokens(tiles.t[tile, self.head], rest)
        decays = self.decays(tile, ahead)
        if self.options.outputs:
            o = of_state(key_tile(tiles.q))
            if from_start is not None:
                o = o * self.of_rows(from_start, o.shape)
            o = o + of_tokens(tiles.p[tile, self.head], new)
            at = self.o_ref.at[rows, self.head, self.values]
            plt.store(at, self.turned((o * unit).astype(self.o_ref.dtype)), mask=valid)
        if self.per_channel:
            k = key_tile(tiles.k_to_end)
        else:
            new = new * self.of_rows(tiles.to_end[tile, self.head], new.shape)
        state = tuple(
            s * decay + (dot(new, x) if flip else dot(x, new, ta=True))
            for s, decay, x in zip(state, decays, k, strict=True)
        )
        return state, following

    def run(self, new_pool_ref: Any) -> None:
        inputs = self.inputs
        start = self.read_state()
        unit = self.unit(start)

        def segment_step(segment: Array, state: State) -> State:
            first, behind = inputs.tile[segment], inputs.tile[segment + 1]
            step = functools.partial(self.tile_step, self.span(segment), unit)
            state, _ = lax.fori_loop(first, behind, step, (state, self.decays_ahead(first)))
            self.write_state(new_pool_ref, segment, state, unit)
            return state

        scaled = tuple(self.turned(s) * (1.0 / unit) for s in start)
        lax.fori_loop(self.chain, self.behind, segment_step, scaled)
        if self.options.outputs:
            self.clear_padding()

    def clear_padding(self) -> None:
        """By the program of the chain behind the last, which has no segments."""
        last = self.inputs.load.shape[0]
        begin, behind = self.inputs.cu[last], self.o_ref.shape[0]
        blocks = lax.div(behind - begin + (self.size - 1), jnp.int32(self.size))

        def clear(step: Array, carry: Array) -> Array:
            token = begin + step * self.size
            valid = (token + iota((self.size,), 0) < behind)[:, None]
            zeros = jnp.zeros((self.size, self.width), self.o_ref.dtype)
            at = self.o_ref.at[pl.ds(token, self.size), self.head, self.values]
            plt.store(at, zeros, mask=valid)
            return carry

        steps = jnp.where(self.chain == last, blocks, 0)
        lax.fori_loop(jnp.int32(0), steps, clear, jnp.int32(0))


def _kernel(*refs: Any, names: tuple[str, ...], options: Options, width: int) -> None:
    first = len(_Inputs._fields)
    tiles = Prepared(**dict(zip(names, refs[first : first + len(names)], strict=True)))
    *o_refs, new_pool_ref = refs[first + len(names) :]
    o_ref = o_refs[0] if o_refs else None
    _Chain(_Inputs(*refs[:first]), tiles, o_ref, options, width).run(new_pool_ref)


def scan(
    prepared: Prepared,
    qkv: Array,
    pool: Array,
    layers: Array,
    segments: Segments,
    tiles: TileRanges,
    options: Options,
) -> tuple[Array | None, Array]:
    """Outputs [T, H, V], if asked for, and the pool with the states that segments store.

    `layers` [G] is the layer of the pool that each segment works on.
    """
    count, (heads, value_dim) = segments.load.shape[0], (pool.shape[2], pool.shape[4])
    width = dividing_block(value_dim, options.tuning.value_block)
    given = {name: x for name, x in prepared._asdict().items() if x is not None}
    inputs = _Inputs(
        layers,
        segments.cu,
        segments.load,
        segments.store,
        chain_end(segments),
        tiles.of_segment,
        pool,
        qkv,
    )
    states = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    out = (jax.ShapeDtypeStruct((qkv.shape[0], heads, value_dim), qkv.dtype),)
    out = out if options.outputs else ()
    call = triton_call(
        functools.partial(_kernel, names=tuple(given), options=options, width=width),
        "gated_delta_rule_scan",
        (value_dim // width, heads, count + 1),
        (*out, states),
        warps=options.tuning.scan_warps,
        stages=options.tuning.scan_stages,
        aliases={inputs._fields.index("pool"): len(out)},
        interpret=options.interpret,
    )
    *o, pool = call(*inputs, *given.values())
    return (o[0] if o else None), pool
