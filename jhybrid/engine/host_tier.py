"""Transfers between the device's pools and pinned host memory.

What leaves: the pages are gathered on the device before any later step writes them, and the copy to
the host goes on behind. What comes back is needed at different times, and one link carries it:

    group inputs, and a state that the request starts from    at once: the replay reads them
    KV                                                        before the question runs
    a state that only becomes a checkpoint again              by nobody

A transfer starts when the programs dispatched before it have run, and whatever a program gets from
the host queues up behind the transfers sent before. So what a replay needs is sent first, and is on
its way while the host makes the step's small inputs, the pages that everything goes to among them.
These follow, and the replay's part is put in its place; then the KV is sent, and the replay is
dispatched.
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
from ..models.pages import PageKind
from .host_moves import Part, put_order
from .host_spans import host_span
from .model_runner import ModelRunner
from .sequence import Sequence

STEP_CHUNKS = 2  # of KV that are sent in a step beside decodes

Pages = dict[PageKind, list[Any]]  # that one sequence's loads go to, of each call that puts them


@dataclass(eq=False)
class _Arriving:
    """What comes for a sequence admitted as `lease`, and the pages that it goes to."""

    sequence: Sequence
    lease: Admission
    pages: Pages
    inputs: list[Any]  # sent, until they are put
    state: StateLoad | None  # until it is put, and the rows of it once they are sent
    unsent: list[Any] = field(default_factory=list)  # of the KV
    kv: list[Any] = field(default_factory=list)
    state_rows: list[Any] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.sequence.lease is self.lease

    def is_ready(self) -> bool:
        coming = jax.tree.leaves((self.kv, self.state_rows))
        return not self.unsent and all(leaf.is_ready() for leaf in coming)


class HostTier:
    """`overlap` False waits for each transfer where it is started (to measure what that costs)."""

    def __init__(self, cache: CacheManager, runner: ModelRunner) -> None:
        self._cache, self._runner = cache, runner
        self._expected: list[_Arriving] = []  # of this step: nothing of them is sent
        self._arriving: list[_Arriving] = []
        self._late: list[_Arriving] = []  # of which a state is to be put at the end of the step
        self.overlap = True

    @property
    def arriving(self) -> int:
        return len(self._arriving)

    @host_span("offload")
    def offload(self) -> None:
        """Dispatch the copies of all pages and states that the cache has evicted."""
        for offload in self._cache.take_offloads():
            if isinstance(offload, StateOffload):
                state = self._runner.take_pages("states", np.array([offload.slot], np.int32))
                offload.chunk.states[offload.depth] = state
            else:
                offload.chunk.payload = self._fetch(offload)

    def expect(self, sequences: Iterable[Sequence]) -> list[Pages]:
        """Take over the loads of newly admitted sequences, and send what these read first: the
        pages, in numpy, that all of it goes to."""
        for sequence in sequences:
            lease = sequence.lease
            if lease is None or not lease.loads:
                continue
            state, pages = lease.state_load, Pages()
            pages["inputs"], inputs = put_order("inputs", _input_parts(lease.loads))
            inputs = self._runner.to_device("inputs", inputs)
            item = _Arriving(sequence, lease, pages, inputs, state)
            if state is not None and state.read:
                self._send_state(item)
            pages["kv"], item.unsent = put_order("kv", _kv_parts(lease.loads))
            pages["states"] = [] if state is None else [np.array([[state.slot]], np.int32)]
            lease.loads = []
            self._expected.append(item)
        return [item.pages for item in self._expected]

    def start(self, pages: list[Pages]) -> None:
        """Put what those sequences read first where they read it; `pages` are those of `expect`,
        on the device."""
        for item, item.pages in zip(self._expected, pages, strict=True):
            if item.state is not None and item.state.read:
                self._put_state(item)
            self._runner.put_pages("inputs", item.pages["inputs"], item.inputs)
            item.inputs = []
            self._arriving.append(item)
        self._expected = []

    def send(self, *, beside_decodes: bool) -> None:
        """Send KV: all of it, or a part of it in a step that something decodes in."""
        room = STEP_CHUNKS if beside_decodes else None
        for item in self._arriving:
            if not (item.alive and item.unsent) or room == 0:
                continue
            now, item.unsent = item.unsent[:room], item.unsent[room:] if room else []
            item.kv += self._runner.to_device("kv", now)
            if not item.unsent:
                self._send_state(item)
            if not self.overlap:
                jax.block_until_ready(item.kv)
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
            self._runner.put_pages("kv", item.pages["kv"], item.kv)
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

    def _send_state(self, item: _Arriving) -> None:
        if item.state is not None:
            rows = item.state.chunk.states[item.state.depth]
            item.state_rows = self._runner.to_device("states", [rows])

    def _put_state(self, item: _Arriving) -> None:
        state, item.state = item.state, None
        if state is not None:
            self._runner.put_pages("states", item.pages["states"], item.state_rows)
            state.arrived = True

    def _fetch(self, offload: Offload) -> dict[str, Any]:
        """The rows of a chunk: its KV, and its group inputs by the first row of each piece."""
        pieces = input_pieces(offload.chunk.with_inputs)
        pages = {piece.start: offload.input_pages[piece.start : piece.stop] for piece in pieces}
        inputs = {at: self._runner.take_pages("inputs", some) for at, some in pages.items()}
        return {"kv": self._runner.take_pages("kv", offload.pages), "inputs": inputs}


def _kv_parts(loads: list[Load]) -> list[Part]:
    """Whole chunks, with the page that each row is for (-1: nowhere)."""
    targets = _targets(loads, [load.pages for load in loads])
    return [(to, chunk.payload["kv"]) for chunk, to in targets.items()]


def _input_parts(loads: list[Load]) -> list[Part]:
    """The pieces of chunks with group inputs that are wanted, and their pages."""
    parts = list[Part]()
    for chunk, to in _targets(loads, [load.input_pages for load in loads]).items():
        wanted = to[: chunk.rows] >= 0
        for piece in input_pieces(wanted) if wanted.any() else ():
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
