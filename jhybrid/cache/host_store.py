"""What evicted pages and states leave in host memory, found again by the tokens they hold.

Consecutive pages that leave the tree together are a chunk, the unit of transfer and of eviction
(least recently used first). Every page of it is entered under all tokens before the page, so that
whatever is left of a prefix in the tree, its continuation is found here. No arrays: a chunk's
`payload` is whatever the engine puts there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.allocator import PoolCounts
from jhybrid.cache.radix_node import Tokens, common_length

CHUNK_ROWS = (8, 16, 32, 64, 128)  # pages of a chunk, padded to one of these: few, large transfers
# Pages whose group inputs travel together: a replay wants few, and wants them first.
PIECE_ROWS = 16
LEAST_CHUNKS = 8  # that the memory holds at least, or chunks are smaller: they leave one by one


@dataclass(eq=False)
class Chunk:
    """Consecutive pages that hold `tokens`, which follow `start` others; `with_inputs` says which
    have group inputs, too. `states` are what has consumed all tokens up to a depth."""

    start: int
    tokens: Tokens
    rows: int
    with_inputs: NDArray[np.bool_]
    exact: bool
    payload: Any = None  # None until the engine has dispatched the copy
    states: dict[int, Any] = field(default_factory=dict)  # likewise
    size: int = 0  # bytes
    keys: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class HostMatch:
    """Rows of chunks that continue a prefix from its last page border on, up to `length`, and the
    depth of the deepest state on the way with its chunk."""

    length: int
    runs: tuple[tuple[Chunk, range], ...] = ()
    state: tuple[Chunk, int] | None = None

    @property
    def exact(self) -> bool:
        return all(chunk.exact for chunk, _ in self.runs)


class HostStore:
    """Chunks within `capacity` bytes, of pages of `page_bytes`, inputs of `input_bytes` and states
    of `state_bytes`."""

    def __init__(
        self,
        capacity: int,
        page_size: int,
        page_bytes: int,
        input_bytes: int,
        state_bytes: int,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"host memory must be at least 1 byte, got {capacity}")
        self.capacity, self.page_size = capacity, page_size
        self.used = 0  # bytes
        self.evicted = 0  # chunks
        self._bytes, self._state_bytes = (page_bytes, input_bytes), state_bytes
        most = capacity // LEAST_CHUNKS
        fitting = [n for n in CHUNK_ROWS if self._chunk_bytes(np.ones(n, bool)) <= most]
        self.chunk_rows = max(fitting, default=CHUNK_ROWS[0])  # pages of a chunk at most
        self._order: OrderedDict[Chunk, None] = OrderedDict()
        self._pages: dict[bytes, list[tuple[Chunk, int]]] = {}

    def match(self, tokens: Tokens, start: int, *, strict: bool) -> HostMatch:
        """The longest continuation of tokens[:start], which are cached elsewhere."""
        size = self.page_size
        at = start // size * size
        if at >= len(tokens) or not self._order:
            return HostMatch(start)
        prefix, found, length = _hash(tokens[:at]), list[tuple[Chunk, range]](), at
        state: tuple[Chunk, int] | None = None
        while at < len(tokens):
            best, common = self._best(prefix.digest(), tokens[at:], strict)
            if best is None:
                break
            chunk, row = best
            whole = common // size  # another chunk may hold more of the page that ends the run
            found.append((chunk, range(row, row + max(whole, 1))))
            length = at + (whole * size or common)
            depth = max((d for d in chunk.states if d <= length), default=0)
            if depth and (state is None or depth > state[1]):
                state = chunk, depth
            if not whole:
                break
            prefix.update(_bytes(tokens[at:length]))
            at = length
        if length <= start:
            return HostMatch(start)
        for chunk in {chunk: None for chunk, _ in found}:
            self._order.move_to_end(chunk)
        return HostMatch(length, tuple(found), state)

    def inputs_of(
        self, tokens: Tokens, pages: NDArray[np.int64], *, strict: bool
    ) -> list[tuple[Chunk, range]] | None:
        """Rows with the group inputs of these pages of `tokens` (of the last, as far as `tokens`
        go), in order; None unless there are some for each."""
        size, first, found = self.page_size, int(pages[0]), list[tuple[Chunk, range]]()
        prefix, wanted = _hash(tokens[: first * size]), set(pages.tolist())
        for index in range(first, int(pages[-1]) + 1):
            part = tokens[index * size : (index + 1) * size]
            if index in wanted:
                held = (
                    (chunk, row)
                    for chunk, row in self._pages.get(prefix.digest(), ())
                    if chunk.with_inputs[row] and (chunk.exact or not strict)
                    if common_length(chunk.tokens[row * size :], part) == len(part)
                )
                chunk, row = next(held, (None, 0))
                if chunk is None:
                    return None
                if found and found[-1][0] is chunk and found[-1][1].stop == row:
                    found[-1] = chunk, range(found[-1][1].start, row + 1)
                else:
                    found.append((chunk, range(row, row + 1)))
            prefix.update(_bytes(part))
        for chunk, _ in found:
            self._order.move_to_end(chunk)
        return found

    def missing(self, tokens: Tokens, first: int, exact: bool) -> list[range]:
        """Runs of pages of `tokens`, from page `first` on, that are not held."""
        size, absent = self.page_size, []
        prefix = _hash(tokens[: first * size])
        for index in range(first, -(-len(tokens) // size)):
            part = tokens[index * size : (index + 1) * size]
            _, common = self._best(prefix.digest(), part, exact)
            if common < len(part):
                follows = absent and absent[-1].stop == index and len(absent[-1]) < self.chunk_rows
                if follows:
                    absent[-1] = range(absent[-1].start, index + 1)
                else:
                    absent.append(range(index, index + 1))
            prefix.update(_bytes(part))
        return absent

    def add(
        self, tokens: Tokens, pages: range, with_inputs: NDArray[np.bool_], exact: bool
    ) -> Chunk:
        """A chunk of these pages of `tokens`. Raises ValueError if it is larger than all there is
        (see `fits`)."""
        size = self.page_size
        own = tokens[pages.start * size : pages.stop * size].copy()
        chunk = Chunk(pages.start * size, own, len(pages), with_inputs, exact)
        chunk.size = self._chunk_bytes(with_inputs)
        if chunk.size > self.capacity:
            raise ValueError(f"a chunk of {chunk.size} bytes, the host has {self.capacity}")
        self._make_room(chunk.size)
        prefix = _hash(tokens[: pages.start * size])
        for row in range(chunk.rows):
            key = prefix.digest()
            self._pages.setdefault(key, []).append((chunk, row))
            chunk.keys.append(key)
            prefix.update(_bytes(own[row * size : (row + 1) * size]))
        self._order[chunk] = None
        self.used += chunk.size
        return chunk

    def add_state(self, tokens: Tokens) -> Chunk | None:
        """The chunk with the last of these tokens, where there is room for the state that has
        consumed them all and there is none."""
        first, depth = (len(tokens) - 1) // self.page_size * self.page_size, len(tokens)
        found, common = self._best(_hash(tokens[:first]).digest(), tokens[first:], True)
        if found is None or common < depth - first or depth in found[0].states:
            return None
        chunk = found[0]
        if chunk.size + self._state_bytes > self.capacity:
            return None
        self._order.move_to_end(chunk)
        self._make_room(self._state_bytes)
        chunk.states[depth] = None
        chunk.size += self._state_bytes
        self.used += self._state_bytes
        return chunk

    def fits(self, pages: range) -> bool:
        """Whether a chunk of so many pages, with group inputs, can be held at all."""
        return self._chunk_bytes(np.ones(len(pages), bool)) <= self.capacity

    def flush(self) -> None:
        """Drops all. Not counted as evictions."""
        while self._order:
            self._forget(self._order.popitem()[0])

    def counts(self) -> PoolCounts:
        """In bytes; what is held is the tree's, since it is nobody's who runs."""
        return PoolCounts(self.capacity, self.capacity - self.used, self.used, 0)

    def check_integrity(self) -> None:
        """Recounts bytes and pages. Raises RuntimeError with the numbers."""
        size = sum(chunk.size for chunk in self._order)
        entered = sum(len(pages) for pages in self._pages.values())
        rows = sum(chunk.rows for chunk in self._order)
        if size != self.used or entered != rows or self.used > self.capacity:
            raise RuntimeError(
                f"host memory: {size} bytes in {rows} pages, recorded {self.used} bytes of "
                f"{self.capacity} and {entered} pages"
            )

    def _chunk_bytes(self, with_inputs: NDArray[np.bool_]) -> int:
        page, inputs = self._bytes
        pieces = sum(padded_rows(len(piece)) for piece in input_pieces(with_inputs))
        return padded_rows(len(with_inputs)) * page + pieces * inputs

    def _make_room(self, size: int) -> None:
        while self.used + size > self.capacity:
            self._forget(self._order.popitem(last=False)[0])
            self.evicted += 1

    def _forget(self, chunk: Chunk) -> None:
        self.used -= chunk.size
        for key in set(chunk.keys):
            left = [page for page in self._pages[key] if page[0] is not chunk]
            if left:
                self._pages[key] = left
            else:
                del self._pages[key]

    def _best(
        self, key: bytes, tokens: Tokens, strict: bool
    ) -> tuple[tuple[Chunk, int] | None, int]:
        """The page behind `key` from which on most of `tokens` are held, and how many are."""
        best, most = None, 0
        for chunk, row in self._pages.get(key, ()):
            common = common_length(chunk.tokens[row * self.page_size :], tokens)
            if common > most and (chunk.exact or not strict):
                best, most = (chunk, row), common
        return best, most


def padded_rows(count: int) -> int:
    return next(rows for rows in CHUNK_ROWS if count <= rows)


def input_pieces(wanted: NDArray[np.bool_]) -> list[range]:
    """The pieces of a chunk's rows in which the group inputs of some row are `wanted`."""
    starts = range(0, len(wanted), PIECE_ROWS)
    pieces = [range(at, min(at + PIECE_ROWS, len(wanted))) for at in starts]
    return [piece for piece in pieces if wanted[piece.start : piece.stop].any()]


def _bytes(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def _hash(tokens: Tokens) -> Any:
    return hashlib.sha256(_bytes(tokens))  # which processors have instructions for
