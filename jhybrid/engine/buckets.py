"""The static shapes of an engine: every step is padded to one of them, so that none is new."""

from __future__ import annotations

from dataclasses import dataclass

MOVES = 8  # states that one call packs or restores
LONG_STEP = 8192  # tokens of a prefill; beyond, padding costs more than another program
MAX_REPLAYS = 4  # sequences of which one call replays group inputs


@dataclass(frozen=True)
class Buckets:
    prefill_tokens: tuple[int, ...]
    prefill_sequences: tuple[int, ...]
    decode: tuple[int, ...]
    checkpoint_interval: int
    pages: int  # page-table width

    def segments(self, tokens: int, sequences: int) -> int:
        """Segments of a prefill: its checkpoints on the grid, and four for each sequence (a part of
        an interval, a branch, the end of the prompt, and the rest)."""
        return -(-tokens // self.checkpoint_interval) + 4 * sequences


def make_buckets(
    max_prefill_tokens: int, max_running: int, checkpoint_interval: int, pages: int
) -> Buckets:
    """Few enough that compiling them all is quick, close enough that padding stays cheap."""
    most = max_prefill_tokens
    tokens = _powers(min(64, most), min(LONG_STEP, most), 6)
    while tokens[-1] < most:
        tokens += (min(2 * tokens[-1], most),)
    # From two up: for a single row XLA copies whole pools to update one slot (see
    # pallas_kernels.ragged), and the embedding to float32 to multiply by it.
    sequences = _powers(2, max(2, min(max_running, 16)), 8)
    decode = _powers(2, max(2, max_running), 4)
    return Buckets(tokens, sequences, decode, checkpoint_interval, pages)


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
