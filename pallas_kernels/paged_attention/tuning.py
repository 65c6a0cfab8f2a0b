"""How the attention kernel is cut: static, from shapes alone, so that a sequence's result depends
on its bucket and never on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

PARTIAL_BYTES = 64 * 2**20  # of the partial results that pieces leave for `combine`
MULTIPROCESSORS = 132
LEAST_PIECE = 128  # keys; a smaller piece costs more to start and to combine than to read


@dataclass(frozen=True)
class Tuning:
    """A program holds `rows` queries: the heads that share a kv head, of one or more tokens."""

    rows: int
    block: int  # keys visited at once
    warps: int
    stages: int
    resident: int = 1  # programs that a multiprocessor is expected to hold at once


@dataclass(frozen=True)
class Cut:
    """Static sizes of the work: `pieces` of at most `piece_keys` keys each, over `tiles` tiles."""

    tiles: int
    pieces: int
    piece_keys: int
    programs: int

    @property
    def whole(self) -> bool:
        """No tile is cut: programs write outputs, and nothing is combined."""
        return self.pieces == self.tiles


def decode_tuning(group: int, dim: int, dtype: DTypeLike) -> Tuning:
    """A few queries against many keys: bound by the bytes of the keys."""
    rows = min(64, max(16, 1 << (group - 1).bit_length()))
    if dtype != jnp.bfloat16:
        return Tuning(rows, block=16 if dim > 256 else 32, warps=4, stages=1, resident=2)
    if dim > 256:
        return Tuning(rows, block=32, warps=8, stages=2)
    return Tuning(rows, block=64, warps=4, stages=2, resident=2)


def prefill_tuning(dim: int, dtype: DTypeLike) -> Tuning:
    """Bound by matrix products."""
    if dtype != jnp.bfloat16:
        return Tuning(rows=64, block=16 if dim > 256 else 32, warps=8, stages=1)
    if dim > 256:
        return Tuning(rows=64, block=64, warps=8, stages=1)
    return Tuning(rows=128, block=64, warps=8, stages=2)


def cut(tiles: int, head_blocks: int, partial_bytes: int, context: int, tuning: Tuning) -> Cut:
    """Keys in pieces as small as the memory for partial results allows; `partial_bytes` is what
    one piece leaves, over all heads."""
    most = max(tiles, PARTIAL_BYTES // partial_bytes)
    least = -(-context * tiles // most)
    piece_keys = max(LEAST_PIECE, 1 << (least - 1).bit_length())
    pieces = tiles * -(-context // piece_keys)
    if pieces == tiles:
        return uncut(tiles, context)
    slots = tuning.resident * MULTIPROCESSORS
    return Cut(tiles, pieces, piece_keys, min(pieces, -(-slots // head_blocks)))


def uncut(tiles: int, context: int) -> Cut:
    return Cut(tiles, tiles, context, tiles)


def fills_device(tiles: int, head_blocks: int, tuning: Tuning) -> bool:
    """Whether uncut tiles occupy every multiprocessor twice over."""
    return tiles * head_blocks >= 2 * tuning.resident * MULTIPROCESSORS


def smaller_rows(tuning: Tuning, rows: int) -> Tuning:
    """As many rows as there are, from 16 up."""
    return replace(tuning, rows=min(tuning.rows, max(16, 1 << (rows - 1).bit_length())))
