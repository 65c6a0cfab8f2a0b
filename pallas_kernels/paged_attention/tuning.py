"""How the attention kernel is cut: static, from shapes alone, so that a sequence's result depends
on its bucket and never on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..device import MULTIPROCESSORS

PARTIAL_BYTES = 64 * 2**20  # of the partial results that pieces leave to be combined
LEAST_PIECE = 128  # keys; a smaller piece costs more to start and to combine than to read
FEW = 32  # queries of a prefill whose programs all run at once


@dataclass(frozen=True)
class Tuning:
    """A program holds `rows` queries: the heads that share a kv head, of one or more tokens.

    The keys of a tile are cut until every multiprocessor has `rounds` programs to run (few queries
    of a prefill: `rounds` at most), and further into pieces of `piece` keys, so that long and short
    sequences take equally long programs.
    """

    rows: int
    block: int  # keys visited at once
    warps: int
    stages: int
    rounds: int
    piece: int
    slack: float = 0.0  # weights stay below 2^slack; 0 scales the sums at every block


def decode_tuning(group: int, dim: int, dtype: DTypeLike) -> Tuning:
    """A few queries against many keys: bound by the bytes of the keys."""
    rows = min(32 if dim > 256 else 64, max(16, 1 << (group - 1).bit_length()))
    cut: dict[str, Any] = {"rounds": 2, "piece": 512}
    if dtype != jnp.bfloat16:
        return Tuning(rows, block=16 if dim > 256 else 32, warps=4, stages=1, **cut)
    if dim > 256:
        return Tuning(rows, block=32, warps=8, stages=3, **cut)
    return Tuning(rows, block=64, warps=4, stages=2, **cut)


def prefill_tuning(tokens: int, group: int, dim: int, dtype: DTypeLike) -> Tuning:
    """Bound by matrix products, or of few queries by the time that keys take to arrive."""
    cut: dict[str, Any] = {"rounds": 1 if tokens <= FEW else 4, "piece": 1 << 20}
    if dtype != jnp.bfloat16:
        return Tuning(64, block=16 if dim > 256 else 32, warps=8, stages=1, **cut)
    if dim > 256:
        return Tuning(64, block=64, warps=8, stages=1, **cut)
    if tokens <= FEW and tokens * group <= 128 < dim:  # a tile: its pieces are short
        return Tuning(128, block=32, warps=8, stages=3, slack=8.0, **cut)
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


def filling(units: int, tuning: Tuning) -> int:
    """Pieces of each of so many tiles of a block of heads, where programs take unlike times: more
    than run at once, so that all multiprocessors end at about the same time."""
    if units >= 2 * MULTIPROCESSORS:
        return 1
    return -(-tuning.rounds * MULTIPROCESSORS // units)


def at_once(units: int, tuning: Tuning) -> int:
    """Pieces where all programs take equally long: as many as run at once, since one more would
    take a second round."""
    return max(1, tuning.rounds * MULTIPROCESSORS // units)


def make_cut(tiles: int, enough: int, partial_bytes: int, context: int, tuning: Tuning) -> Cut:
    """`enough` pieces are as many as the multiprocessors need; `partial_bytes` is what one piece
    leaves, over all heads."""
    most = min(max(enough, -(-context // tuning.piece)), -(-context // LEAST_PIECE))
    most = max(1, min(most, PARTIAL_BYTES // (tiles * partial_bytes)))
    return Cut(tiles, min(enough, most), most)


def programs(cut: Cut, head_blocks: int) -> int:
    """One for each piece, or a few that take pieces in turn: most pieces may not be used."""
    few = -(-4 * MULTIPROCESSORS // head_blocks)
    return cut.pieces if cut.whole else min(cut.pieces, few)
