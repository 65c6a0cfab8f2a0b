"""The static shapes of an engine: every step is padded to one of them, so that none is new."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.tiled_matmul.tuning import TiledTuning

MOVES = 8  # states that one call packs or restores
LONG_STEP = 8192  # tokens of a prefill: more at once pay for a whole prompt's attention alone
MAX_REPLAYS = 4  # sequences of which one call replays group inputs
SHORT = 32  # rows whose products run as fast as those of a decode step (see skinny_matmul)
REPLAY_CALL = 128  # tokens whose replay takes as long as one more call does beside its tokens
PREFILL_CALL = 256  # the same of a prefill: a step reads all weights, and is sent and answered
TILE = TiledTuning.rows  # of a long step's products
LONGEST_REPLAY = 1792  # tokens of one call: those of Qwen3.6-27B hold 2.9 GB until it is done


@dataclass(frozen=True)
class Buckets:
    prefill_tokens: tuple[int, ...]
    long_tokens: tuple[int, ...]  # of steps that are one prompt from its first token on
    prefill_sequences: tuple[int, ...]
    replay_tokens: tuple[int, ...]
    decode: tuple[int, ...]
    checkpoint_interval: int
    pages: int  # page-table width

    @property
    def all_prefill_tokens(self) -> tuple[int, ...]:
        return (*self.prefill_tokens, *self.long_tokens)

    def segments(self, tokens: int, sequences: int) -> int:
        """Segments of a prefill: its checkpoints on the grid, and four for each sequence (a part of
        an interval, a branch, the end of the prompt, and the rest)."""
        return -(-tokens // self.checkpoint_interval) + 4 * sequences

    def replay_calls(self, tokens: int) -> tuple[int, ...]:
        """Buckets that hold so many tokens together. A replay is bound by arithmetic from some 200
        tokens on, so that padding costs what tokens cost, and a call costs its weights' bytes."""
        return _calls(self.replay_tokens, tokens, REPLAY_CALL)

    def prefill_step(self, waiting: Sequence[tuple[int, bool]]) -> int:
        """How many of the tokens that sequences wait for, in order, the next step takes: all, or
        those that fill a bucket when the rest costs less in steps of its own than as padding.

        Each is (tokens, whether the sequence is at its beginning). A long one that is goes alone.
        """
        if waiting and self._goes_alone(*waiting[0]):
            sizes, tokens = self.all_prefill_tokens, waiting[0][0]
        else:
            before = itertools.takewhile(lambda item: not self._goes_alone(*item), waiting)
            sizes, tokens = self.prefill_tokens, sum(n for n, _ in before)
        return min(tokens, _calls(sizes, tokens, PREFILL_CALL)[0]) if tokens else 0

    def is_full(self, waiting: Sequence[tuple[int, bool]]) -> bool:
        """Whether no sequence after these would run in the next step. It is better admitted later,
        when what runs now may be a hit for it."""
        total = sum(n for n, _ in waiting)
        return total >= self.prefill_tokens[-1] or any(self._goes_alone(*one) for one in waiting)

    def _goes_alone(self, tokens: int, new: bool) -> bool:
        return bool(self.long_tokens) and new and tokens > self.prefill_tokens[-1]

    def scored_shape(self, tokens: int) -> tuple[int, bool]:
        """Sequences of a step whose prompts are scored, and whether it is one whole prompt: one
        shape for each number of tokens, as few ask for it."""
        long = tokens in self.long_tokens
        return self.prefill_sequences[0 if long else -1], long

    def prefill_bucket(self, tokens: int) -> int:
        return bucket(self.all_prefill_tokens, tokens)


def _calls(sizes: tuple[int, ...], tokens: int, call: int) -> tuple[int, ...]:
    """The buckets, longest first, that hold so many tokens and cost least; each costs its size and
    `call` tokens more."""
    longest = sizes[-1]
    if tokens > longest:
        whole, rest = divmod(tokens, longest)
        return (longest,) * whole + (_calls(sizes, rest, call) if rest else ())
    one = bucket(sizes, tokens)
    if one in (tokens, sizes[0]):
        return (one,)
    largest = max(size for size in sizes if size < tokens)
    apart = (largest, *_calls(sizes, tokens - largest, call))
    return min((one,), apart, key=lambda calls: sum(calls) + call * len(calls))


def make_buckets(
    max_prefill_tokens: int,
    max_running: int,
    checkpoint_interval: int,
    pages: int,
    *,
    longest_alone: int = 0,
    single: bool = False,
) -> Buckets:
    """Few enough that compiling them all is quick, close enough that padding stays cheap.

    `longest_alone`: tokens of the longest whole prompt whose attention has a form that makes a long
    step pay; 0: there is none. `single`: a decode step of one sequence has a form of its own, whose
    products take a tenth less time; on a CPU XLA would copy whole pools to update one slot.
    """
    most = max_prefill_tokens
    tokens = _powers(min(64, most), min(LONG_STEP, most), 4)
    longest = min(most, longest_alone)
    longer = _powers(2 * LONG_STEP, longest, 2) if longest > LONG_STEP else ()
    if most > 64:
        tokens = (SHORT, *tokens)
    # From two up: for a single row XLA copies whole pools to update one slot on a CPU, and the
    # embedding to float32 to multiply by it.
    sequences = _powers(2, max(2, min(max_running, 16)), 8)
    replays = _replay_sizes(min(LONGEST_REPLAY, max_prefill_tokens))
    decode = _powers(2, max(2, max_running), 4)
    if single:
        decode = (1, *decode) if max_running > 1 else (1,)
    return Buckets(tokens, longer, sequences, replays, decode, checkpoint_interval, pages)


def table_pages(context: int, page_size: int) -> int:
    """Pages of a sequence's table: they hold `context` tokens, rounded up to whole tiles. The
    longest step may be as long, and another number of rows would have slower products."""
    unit = math.lcm(page_size, TILE)
    return -(-context // unit) * (unit // page_size)


def _replay_sizes(most: int) -> tuple[int, ...]:
    """Powers of two and, from 256 on, three sizes between each and the next; and `most` itself."""
    octaves = [256 << n for n in range((most // 256).bit_length())]
    sizes = (64, 128, *(octave // 4 * n for octave in octaves for n in (4, 5, 6, 7)))
    return (*(size for size in sizes if size < most), most)


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, low * factor, ... and high itself."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


def bucket(sizes: tuple[int, ...], needed: int) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise RuntimeError(f"a step needs {needed}, the largest bucket of {sizes} is smaller")
