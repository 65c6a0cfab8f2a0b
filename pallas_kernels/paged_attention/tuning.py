"""How the attention kernel is cut: static, from shapes alone, so that a sequence's result depends
on its bucket and never on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

PARTIAL_BYTES = 64 * 2**20  # of the partial results that pieces leave to be combined
MULTIPROCESSORS = 132
LEAST_PIECE = 128  # keys; a smaller piece costs more to start and to combine than to read
START = 256  # keys that a program visits in the time that it takes to start and to leave its sums


@dataclass(frozen=True)
class Tuning:
    """A program holds `rows` queries: the heads that share a kv head, of one or more tokens.

    A multiprocessor runs `resident` programs at a time. The keys of a tile are cut so that all
    programs end soon, and further into pieces of `piece` keys, so that long and short sequences
    take equally long programs.
    """

    rows: int
    block: int  # keys visited at once
    warps: int
    stages: int
    resident: int
    piece: int
    slack: float = 0.0  # weights stay below 2^slack; 0 scales the sums at every block


def decode_tuning(group: int, dim: int, dtype: DTypeLike) -> Tuning:
    """A few queries against many keys: bound by the bytes of the keys."""
    rows = min(32 if dim > 256 else 64, max(16, 1 << (group - 1).bit_length()))
    cut: dict[str, Any] = {"resident": 2, "piece": 512}
    if dtype != jnp.bfloat16:
        return Tuning(rows, block=16 if dim > 256 else 32, warps=4, stages=1, **cut)
    if dim > 256:
        return Tuning(rows, block=32, warps=8, stages=3, **cut)
    return Tuning(rows, block=64, warps=4, stages=2, **cut)


def prefill_tuning(dim: int, dtype: DTypeLike) -> Tuning:
    """Bound by matrix products."""
    cut: dict[str, Any] = {"resident": 1, "piece": 1 << 20}
    if dtype != jnp.bfloat16:
        return Tuning(64, block=16 if dim > 256 else 32, warps=8, stages=1, **cut)
    if dim > 256:
        return Tuning(64, block=64, warps=8, stages=1, **cut)
    return Tuning(128, block=64, warps=8, stages=2, slack=8.0, **cut)


@dataclass(frozen=True)
class Cut:
    """Static bounds of the work: at most `most` pieces for a tile, and at least `least` for one
    that is long enough."""

    tiles: int
    least: int
    most: int

    @property
    def whole(self) -> bool:
        """No tile is cut: programs write outputs, and nothing is combined."""
        return self.most == 1

    @property
    def pieces(self) -> int:
        return self.tiles * self.most


def make_cut(
    tiles: int, busy: int, head_blocks: int, partial_bytes: int, context: int, tuning: Tuning
) -> Cut:
    """Of `tiles` at most, `busy` have keys to see when the batch is one sequence. `partial_bytes`
    is what one piece leaves, over all heads."""
    room = max(1, PARTIAL_BYTES // (tiles * partial_bytes))
    enough = _pieces(busy * head_blocks, context, room, tuning)
    most = min(max(enough, -(-context // tuning.piece)), -(-context // LEAST_PIECE))
    most = max(1, min(most, room))
    return Cut(tiles, min(enough, most), most)


def _pieces(units: int, context: int, room: int, tuning: Tuning) -> int:
    """Into how many each of so many tiles of a block of heads is cut, `room` at most: what is over
    soonest, where as many programs as fit on the device start and end together."""
    places = tuning.resident * MULTIPROCESSORS
    if units >= 2 * places:
        return 1

    def time(pieces: int) -> float:
        return -(-units * pieces // places) * (context / pieces + START)

    return min(range(1, min(room, 4 * places // units) + 1), key=time)


def programs(cut: Cut, head_blocks: int) -> int:
    """One for each piece, or a few that take pieces in turn: most pieces may not be used."""
    few = -(-4 * MULTIPROCESSORS // head_blocks)
    return cut.pieces if cut.whole else min(cut.pieces, few)
