"""Ragged batches: tokens packed end to end, cut into segments, regrouped into aligned tiles.

A segment is a run of tokens of one sequence with a recurrent state at its start and at its end.
A sequence that must leave checkpoints at interior depths is several segments, each continuing the
one before; so a state at any depth costs one more segment and no other mechanism.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

NO_SLOT = -1  # load: start from zeros; store: keep nothing
CONTINUE = -2  # load: start from the end of the segment before


class Segments(NamedTuple):
    """`cu[i]:cu[i+1]` are the packed tokens of segment i.

    `load[i]` is the pool slot holding the state before its first token, NO_SLOT for zeros or
    CONTINUE; `store[i]` the slot that receives the state after its last token, or NO_SLOT.
    Unused trailing segments are empty, with NO_SLOT in both. Slots stored to are distinct, and a
    slot stored to is loaded by no other chain of CONTINUEs.
    """

    cu: Int32[Array, " G1"]
    load: Int32[Array, " G"]
    store: Int32[Array, " G"]


class Part(NamedTuple):
    """Where a result goes: to rows `first` and on of an array of `size` rows.

    The other rows are those of `others`, or hold anything where it is None.
    """

    size: int
    first: int | Array
    others: Array | None


class Tiles(NamedTuple):
    """Packed tokens regrouped into tiles of C tokens, none of which crosses a segment."""

    tokens: Int32[Array, "N C"]  # packed index of each cell; 0 where not valid
    valid: Bool[Array, "N C"]
    segment: Int32[Array, " N"]
    first: Bool[Array, " N"]  # the tile starts its segment
    cell_of_token: Int32[Array, " T"]  # flat cell (tile * C + row) of each packed token


def put_part(x: Array, part: Part) -> Array:
    """x [T, ...] in its place among `part.size` rows."""
    others = part.others
    if others is None:
        others = jnp.zeros((part.size, *x.shape[1:]), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(others, x, part.first, 0)


def owner(cu: Int32[Array, " G1"], size: int) -> Int32[Array, " T"]:
    """Index of the segment (or sequence) that each of `size` packed tokens belongs to."""
    return _find(cu[1:-1], jnp.arange(size, dtype=cu.dtype))


def _find(borders: Int32[Array, " G"], index: Int32[Array, " N"]) -> Int32[Array, " N"]:
    """How many borders lie at or before each index. One comparison of all with all: there are
    few borders, and a search loop would not be shared by the layers that ask the same."""
    return jnp.sum(borders <= index[:, None], axis=1, dtype=jnp.int32)


def chain_start(segments: Segments) -> Int32[Array, " G"]:
    """For each segment, the index of the segment that its chain of CONTINUEs starts with."""
    index = jnp.arange(segments.load.shape[0], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(segments.load == CONTINUE, 0, index))


def make_tiles(
    cu: Int32[Array, " G1"],
    size: int,
    tile: int,
    keep_empty: Bool[Array, " G"] | None = None,
) -> Tiles:
    """Tiles of `tile` tokens over `size` packed tokens; their number is static.

    `keep_empty` marks empty segments that still need a tile (their state passes through it).
    """
    groups = cu.shape[0] - 1
    count = -(-size // tile) + groups  # every segment wastes at most one tile
    lengths = cu[1:] - cu[:-1]
    per_segment = -(-lengths // tile)
    if keep_empty is not None:
        per_segment = jnp.maximum(per_segment, keep_empty.astype(jnp.int32))
    ends = jnp.cumsum(per_segment)
    starts = ends - per_segment
    index = jnp.arange(count, dtype=jnp.int32)
    segment = _find(ends[:-1], index)
    offset = (index - starts[segment])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)
    valid = (offset < lengths[segment][:, None]) & (index < ends[-1])[:, None]
    tokens = jnp.where(valid, cu[segment][:, None] + offset, 0)
    token_segment = owner(cu, size)
    row = jnp.arange(size, dtype=jnp.int32) - cu[token_segment]
    cell = (starts[token_segment] + row // tile) * tile + row % tile
    first = (index == starts[segment]) & (index < ends[-1])
    return Tiles(tokens, valid, segment, first, jnp.clip(cell, 0, count * tile - 1))


class TileRanges(NamedTuple):
    """The same tiles as `make_tiles` makes, described by ranges for kernels to read."""

    start: Int32[Array, " N"]  # packed index of the tile's first token
    rows: Int32[Array, " N"]  # tokens in it; 0 in unused tiles
    of_segment: Int32[Array, " G1"]  # tiles of segment i are of_segment[i]:of_segment[i + 1]


def make_tile_ranges(cu: Int32[Array, " G1"], size: int, tile: int) -> TileRanges:
    lengths = cu[1:] - cu[:-1]
    ends = jnp.cumsum(-(-lengths // tile), dtype=jnp.int32)
    starts = jnp.pad(ends, (1, 0))
    index = jnp.arange(-(-size // tile) + lengths.shape[0], dtype=jnp.int32)
    segment = _find(ends[:-1], index)
    offset = (index - starts[segment]) * tile
    rows = jnp.where(index < ends[-1], jnp.clip(lengths[segment] - offset, 0, tile), 0)
    return TileRanges(jnp.where(rows > 0, cu[segment] + offset, 0), rows, starts)


def chain_end(segments: Segments) -> Int32[Array, " G"]:
    """For a segment that starts a chain, the index behind the chain's last segment; for one that
    continues another, its own index: a loop over the chains visits each segment once."""
    count = segments.load.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    starts = jnp.where(segments.load == CONTINUE, count, index)
    behind = jax.lax.cummin(jnp.pad(starts[1:], (0, 1), constant_values=count), reverse=True)
    return jnp.where(segments.load == CONTINUE, index, behind)


def chain_at(index: Array, load: Any, end: Any) -> tuple[Array, Array, Array]:
    """For a program of the chain that starts with segment `index`, from arrays or references of all
    segments' `load` and `chain_end`: a segment whose entries may be read, the slot that the chain
    starts from (negative: none), the segment behind its last. The index behind the last segment
    is a chain of none, for the program that clears what no segment covers."""
    count = load.shape[0]
    used, segment = index < count, jnp.minimum(index, count - 1)
    return segment, jnp.where(used, load[segment], NO_SLOT), jnp.where(used, end[segment], index)


def gather_slots(pool: Array, slots: Int32[Array, " N"], layer: int | Array) -> Array:
    """`pool[slots, layer]` with zeros where the slot is negative. Pool is [S, L, ...].

    The barrier makes the rows a value of their own. Were the read fused into later work, some of it
    could come after the pool is written again, and XLA on GPUs would copy the whole pool for it.
    """
    rows = jax.lax.optimization_barrier(pool[jnp.maximum(slots, 0), layer])
    keep = (slots >= 0).reshape((-1,) + (1,) * (rows.ndim - 1))
    return jnp.where(keep, rows, jnp.zeros((), rows.dtype))


def scatter_slots(pool: Array, slots: Int32[Array, " N"], layer: int | Array, rows: Array) -> Array:
    """Pool with `rows` at `[slots, layer]`; rows with a negative slot are dropped.

    (With a single slot XLA fuses reading, updating and writing on a CPU, and keeps a copy of the
    pool to be safe: there batches are of two or more.)
    """
    at = pool.at[or_outside(slots, pool.shape[0]), layer]
    return at.set(rows.astype(pool.dtype), mode="drop", unique_indices=True)


def or_outside(index: Int32[Array, " N"], size: int) -> Int32[Array, " N"]:
    """`index` with negative entries moved out of bounds, each to a place of its own: a scatter that
    drops them may then be told that no two indices are equal, and need not order its writes."""
    return jnp.where(index >= 0, index, size + jnp.arange(index.shape[0], dtype=index.dtype))
