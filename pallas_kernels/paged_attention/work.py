"""Who attends to what: queries in tiles of one sequence, the keys of a tile in pieces."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from ..ragged import make_tile_ranges, owner
from .tuning import LEAST_PIECE, Cut, Tuning


class Queries(NamedTuple):
    """Tile n is packed queries start[n]:start[n] + tokens[n] of sequence[n]."""

    start: Int32[Array, " N"]
    tokens: Int32[Array, " N"]
    sequence: Int32[Array, " N"]
    of_token: Int32[Array, " T"]


class Tiles(NamedTuple):
    """The last query of tile n sees `keys[n]` keys. `queries` None: tile n is query n."""

    keys: Int32[Array, " N"]
    queries: Queries | None


class Pieces(NamedTuple):
    """Piece i is keys first[i]:end[i] of tile[i]; those of tile n are of_tile[n]:of_tile[n + 1].

    `used` is how many there are; the rest of the arrays means nothing.
    """

    tile: Int32[Array, " W"]
    first: Int32[Array, " W"]
    end: Int32[Array, " W"]
    used: Int32[Array, " 1"]
    of_tile: Int32[Array, " N1"]


def decode_tiles(positions: Int32[Array, " N"]) -> Tiles:
    """A tile for each query, padding rows too."""
    return Tiles(positions + 1, None)


def prefill_tiles(
    positions: Int32[Array, " T"], cu_seqlens: Int32[Array, " N1"], tokens: int
) -> Tiles:
    """Tiles of `tokens` queries. Packed tokens behind the last sequence are a sequence of their own
    that sees no key, so that their outputs are written too (zeros)."""
    size, sequences = positions.shape[0], cu_seqlens.shape[0] - 1
    cu = jnp.append(cu_seqlens, jnp.int32(size))
    ranges = make_tile_ranges(cu, size, tokens)
    index = jnp.arange(ranges.start.shape[0], dtype=jnp.int32)
    of = jnp.sum(ranges.of_segment[1:-1] <= index[:, None], axis=1, dtype=jnp.int32)
    last = jnp.clip(ranges.start + ranges.rows - 1, 0, size - 1)
    keys = jnp.where((ranges.rows > 0) & (of < sequences), positions[last] + 1, 0)
    segment = owner(cu, size)
    row = jnp.arange(size, dtype=jnp.int32) - cu[segment]
    of_token = ranges.of_segment[segment] + row // tokens
    sequence = jnp.minimum(of, sequences - 1)
    return Tiles(keys, Queries(ranges.start, ranges.rows, sequence, of_token))


def make_pieces(tiles: Tiles, cut: Cut, tuning: Tuning) -> Pieces:
    """The keys of each tile in even pieces of whole blocks: as many as its own length asks for."""
    index = jnp.arange(cut.tiles, dtype=jnp.int32)
    if cut.whole:  # the longest are late in a sequence: they start first
        order = index[::-1]
        used, of_tile = jnp.full(1, cut.tiles, jnp.int32), jnp.append(index, cut.tiles)
        return Pieces(order, jnp.zeros_like(order), tiles.keys[order], used, of_tile)
    keys = tiles.keys
    per_tile = jnp.minimum(-(-keys // LEAST_PIECE), cut.least)
    per_tile = jnp.minimum(jnp.maximum(per_tile, -(-keys // tuning.piece)), cut.most)
    of_tile = jnp.pad(jnp.cumsum(per_tile, dtype=jnp.int32), (1, 0))
    piece = jnp.arange(cut.pieces, dtype=jnp.int32)
    tile = jnp.sum(of_tile[1:-1] <= piece[:, None], axis=1, dtype=jnp.int32)
    even = -(-keys // jnp.maximum(per_tile, 1))
    size = -(-even // tuning.block) * tuning.block
    first = (piece - of_tile[tile]) * size[tile]
    end = jnp.minimum(first + size[tile], keys[tile])
    return Pieces(tile, first, end, of_tile[-1:], of_tile)
