"""Transfers between the device's pools and pinned host memory.

What leaves: the pages are gathered on the device before any later step writes them, and the copy to
the host goes on behind. What comes back is needed at different times, and one link carries it:

    group inputs, and a state that the request starts from    at once: the replay reads them
    KV                                                        before the question runs
    a state that only becomes a checkpoint again              by nobody

A transfer starts when the programs dispatched before it have run, and whatever a program gets from
the host queues up behind the transfers sent before. So what a replay needs is sent and put in its
place first, its small inputs before all else; then the KV is sent, and the replay is dispatched.
Where nothing decodes, all that follows is dispatched at once, and the device waits for the KV.
Beside decodes the KV goes a few chunks a step, since their inputs take the same way, and is put in
its pages when it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..cache.admission import Admission
from ..cache.cache_manager import CacheManager
from ..cache.host_store import Chunk, input_pieces, padded_rows
from ..cache.offload import Load, Offload, StateLoad, StateOffload
from .host_moves import Part
from .model_runner import ModelRunner
from .sequence import Sequence

STEP_CHUNKS = 2  # of KV that are sent in a step beside decodes


@dataclass(eq=False)
class _Arriving:
    """KV for the pages of a sequence admitted as `lease`: to be sent, and on its way."""

    sequence: Sequence
    lease: Admission
    unsent: list[Part]
    parts: list[Part] = field(default_factory=list)
    state: StateLoad | None = None  # that nobody reads yet, and the rows of it once they are sent
    state_rows: list[Any] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.sequence.lease is self.lease

    def is_ready(self) -> bool:
        coming = [rows for _, rows in self.parts], self.state_rows
        return not self.unsent and all(leaf.is_ready() for leaf in jax.tree.leaves(coming))


class HostTier:
    """`overlap` False waits for each transfer where it is started (to measure what that costs)."""

    def __init__(self, cache: CacheManager, runner: ModelRunner) -> None:
        self._cache, self._runner = cache, runner
        self._arriving: list[_Arriving] = []
        self._late: list[_Arriving] = []  # of which a state is to be put at the end of the step
        self.overlap = True

    @property
    def arriving(self) -> int:
        return len(self._arriving)

    def expects(self, admitted: Iterable[Sequence]) -> bool:
        """Whether transfers are on the way, or will be once `start` is told of these sequences."""
        return bool(self._arriving) or any(s.lease and s.lease.loads for s in admitted)

    def offload(self) -> None:
        """Dispatch the copies of all pages and states that the cache has evicted."""
        for offload in self._cache.take_offloads():
            if isinstance(offload, StateOffload):
                state = self._runner.take_pages("states", np.array([offload.slot], np.int32))
                offload.chunk.states[offload.depth] = state
            else:
                offload.chunk.payload = self._fetch(offload)

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Send what newly admitted sequences read first, and put it where they read it."""
        for sequence in sequences:
            lease = sequence.lease
            if lease is None or not lease.loads:
                continue
            item = _Arriving(sequence, lease, _kv_parts(lease.loads), state=lease.state_load)
            if item.state is not None and item.state.read:
                item.state_rows = self._runner.to_device("states", [_state_rows(item.state)])
                self._put_state(item)
            inputs = self._sent("inputs", _input_parts(lease.loads))
            self._runner.put_pages("inputs", inputs)
            lease.loads = []
            self._arriving.append(item)

    def send(self, *, beside_decodes: bool) -> None:
        """Send KV: all of it, or a part of it in a step that something decodes in."""
        room = STEP_CHUNKS if beside_decodes else None
        for item in self._arriving:
            if not (item.alive and item.unsent) or room == 0:
                continue
            now, item.unsent = item.unsent[:room], item.unsent[room:] if room else []
            item.parts += self._sent("kv", now)
            if not item.unsent and item.state is not None:
                item.state_rows = self._runner.to_device("states", [_state_rows(item.state)])
            if not self.overlap:
                jax.block_until_ready([rows for _, rows in item.parts])
            room = room and room - len(now)

    def settle(self, *, wait: bool) -> None:
        """Put KV that has arrived into its pages; with `wait` also what was sent and has not, which
        makes the device wait for it, but not the host."""
        coming = []
        for item in self._arriving:
            if not item.alive:
                continue
            if not (wait or item.is_ready()):
                coming.append(item)
                continue
            self._runner.put_pages("kv", item.parts)
            item.sequence.kv_arrived = True
            if wait:
                self._late.append(item)
            else:
                self._put_state(item)
        self._arriving = coming

    def settle_states(self) -> None:
        """Put the states that came last: nothing in a step should have waited for them."""
        for item in self._late:
            self._put_state(item)
        self._late.clear()

    def _put_state(self, item: _Arriving) -> None:
        state, item.state = item.state, None
        if state is not None:
            at = np.array([state.slot], np.int32)
            self._runner.put_pages("states", [(at, item.state_rows[0])])
            state.arrived = True

    def _fetch(self, offload: Offload) -> dict[str, Any]:
        """The rows of a chunk: its KV, and its group inputs by the first row of each piece."""
        pieces = input_pieces(offload.chunk.with_inputs)
        pages = {piece.start: offload.input_pages[piece.start : piece.stop] for piece in pieces}
        inputs = {at: self._runner.take_pages("inputs", some) for at, some in pages.items()}
        return {"kv": self._runner.take_pages("kv", offload.pages), "inputs": inputs}

    def _sent(self, kind: Any, parts: list[Part]) -> list[Part]:
        rows = self._runner.to_device(kind, [rows for _, rows in parts])
        return [(targets, new) for (targets, _), new in zip(parts, rows, strict=True)]


def _state_rows(state: StateLoad) -> Any:
    return state.chunk.states[state.depth]


def _kv_parts(loads: list[Load]) -> list[Part]:
    """Whole chunks, with the page that each row is for (-1: nowhere)."""
    targets = _targets(loads, [load.pages for load in loads])
    return [(to, chunk.payload["kv"]) for chunk, to in targets.items()]


def _input_parts(loads: list[Load]) -> list[Part]:
    """The pieces of chunks with group inputs that are wanted, and their pages."""
    parts = list[Part]()
    for chunk, to in _targets(loads, [load.input_pages for load in loads]).items():
        for piece in input_pieces(to[: chunk.rows] >= 0):
            pages = np.full(padded_rows(len(piece)), -1, np.int32)
            pages[: len(piece)] = to[piece.start : piece.stop]
            parts.append((pages, chunk.payload["inputs"][piece.start]))
    return parts


def _targets(loads: list[Load], pages: list[np.ndarray]) -> dict[Chunk, np.ndarray]:
    """For each row of each chunk, padded, the page that it goes to."""
    targets = dict[Chunk, np.ndarray]()
    for load, to in zip(loads, pages, strict=True):
        blank = np.full(padded_rows(load.chunk.rows), -1, np.int32)
        targets.setdefault(load.chunk, blank)[load.rows.start : load.rows.stop] = to
    return targets
