"""Transfers between the device's pools and pinned host memory.

What leaves: the pages are gathered on the device before any later step writes them, and the copy to
the host goes on behind. What comes back is needed at different times, and one link carries it:

    group inputs, and a state that the request starts from    at once: the replay reads them
    KV of the lower layers                                    before the question runs
    KV of the upper layers                                    when it has run through the lower ones
    a state that only becomes a checkpoint again              by nobody

The link finishes what one of its queues holds before it turns to the next, so that transfers which
are under way together end together. A transfer waits for the programs dispatched before it. So each
is dispatched behind a program that waits for what must come first:

    send inputs, put inputs | send lower | replay, put lower | send upper | question, put upper

What the replays take besides is handed over before the KV, or it may wait for a queue of that.
Beside decodes the KV goes a few chunks a step, and is put in its pages when it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..cache.admission import Admission
from ..cache.cache_manager import CacheManager
from ..cache.host_store import input_pieces
from ..cache.offload import Offload, StateLoad, StateOffload
from ..models.pages import KV, PageKind
from .host_moves import Part, chunk_pages, input_parts, put_order
from .host_spans import host_span
from .model_runner import ModelRunner
from .sequence import Sequence

# Of the KV of chunks, what is sent in a step beside decodes (a quarter of its layers are upper).
STEP_PARTS: dict[PageKind, int] = {"lower-kv": 2, "upper-kv": 6}
SENT: tuple[PageKind, ...] = (*KV, "states")

Pages = dict[PageKind, list[Any]]  # that one sequence's loads go to, of each call that puts them


@dataclass(eq=False)
class _Delivery:
    """What one call puts: the rows of some parts of `size` bytes each, first in host memory and
    then in `sent`."""

    kind: PageKind
    to: int  # place of its pages among those of the kind
    size: int
    unsent: list[Any]
    sent: list[Any] = field(default_factory=list)

    def is_ready(self) -> bool:
        return not self.unsent and all(leaf.is_ready() for leaf in jax.tree.leaves(self.sent))


@dataclass(eq=False)
class _Arriving:
    """What comes for a sequence admitted as `lease`, and the pages that it goes to."""

    sequence: Sequence
    lease: Admission
    pages: Pages = field(default_factory=dict)
    first: list[_Delivery] = field(default_factory=list)  # what the sequence reads before the KV
    kv: deque[_Delivery] = field(default_factory=deque)
    late: list[_Delivery] = field(default_factory=list)  # the state, if nobody starts from it
    state: StateLoad | None = None  # until it is put

    @property
    def alive(self) -> bool:
        return self.sequence.lease is self.lease

    def deliveries(self) -> list[_Delivery]:
        return [*self.kv, *self.late]


class HostTier:
    """What is sent and not yet put takes at most `budget` bytes, or as much as one part does.

    `overlap` False waits for each transfer where it is started (to measure what that costs)."""

    def __init__(self, cache: CacheManager, runner: ModelRunner, budget: int) -> None:
        self._cache, self._runner, self._budget = cache, runner, budget
        self._expected: list[_Arriving] = []  # of this step: their pages are not on the device yet
        self._arriving: list[_Arriving] = []
        self._late: list[_Arriving] = []  # of which a state is to be put at the end of the step
        self._in_flight = 0  # bytes
        self._full = False  # something was not sent for want of room
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

    @host_span("expect")
    def expect(self, sequences: Iterable[Sequence]) -> list[Pages]:
        """Take over the loads of newly admitted sequences, send what these read first, and put it:
        the pages, in numpy, that all else goes to."""
        for sequence in sequences:
            lease = sequence.lease
            if lease is None or not (lease.loads or lease.input_loads):
                continue
            item = _Arriving(sequence, lease, state=lease.state_load)
            if "inputs" in self._runner.host_rows:
                item.first += self._deliveries(
                    item, "inputs", input_parts([*lease.loads, *lease.input_loads])
                )
            if item.state is not None and item.state.read:
                item.first += self._deliveries(item, "states", [_state_part(item.state)])
            self._expected.append(item)
            self._send_first()
        for item in self._expected:
            self._put_all(item, item.first)
            item.pages.clear()
            targets = chunk_pages(item.lease.loads, [load.pages for load in item.lease.loads])
            for kind in self._runner.kv_kinds:  # whole chunks
                parts = [(to, chunk.payload[kind]) for chunk, to in targets.items()]
                item.kv.extend(self._deliveries(item, kind, parts))
            if item.state is not None:
                item.late += self._deliveries(item, "states", [_state_part(item.state)])
            if item.lease.loads:  # with inputs alone nothing is left to arrive
                self._arriving.append(item)
            item.lease.loads, item.lease.input_loads = [], []
        return [item.pages for item in self._expected]

    def hold(self, pages: list[Pages]) -> None:
        """What `expect` gave, on the device."""
        for item, held in zip(self._expected, pages, strict=True):
            item.pages = held
        self._expected = []

    def send(
        self, kinds: Collection[PageKind] = SENT, most: Mapping[PageKind, int] | None = None
    ) -> None:
        """Send KV and states that nobody starts from: what there is room for, or no more than
        `most` parts of a kind."""
        self._forget_dead()
        left = dict(most or {})
        for item in self._arriving:
            for delivery in item.deliveries():
                if delivery.kind not in kinds:
                    continue
                sent = self._send(delivery, left.get(delivery.kind))
                if delivery.unsent:  # in order: so the oldest always has room at last
                    return
                if delivery.kind in left:
                    left[delivery.kind] -= sent

    def _make_room(self, size: int) -> None:
        """For a part of so many bytes. Put whatever has been sent as a whole, arrived or not: what
        is left then is less than a call puts, and a call of several parts has room beside it. A
        part that is larger than those has none: the rest of that call is sent, and put, too."""
        self._forget_dead()
        for item in (*self._arriving, *self._late):
            while item.kv and not item.kv[0].unsent:
                self._put_all(item, [item.kv.popleft()])
            if not any(state.unsent for state in item.late):
                self._put_all(item, item.late)
        for item in self._arriving:
            if item.kv and item.kv[0].sent and self._in_flight + size > self._budget:
                self._put_all(item, [item.kv.popleft()])

    def _forget_dead(self) -> None:
        for item in self._arriving:
            if not item.alive:
                self._in_flight -= sum(d.size * len(d.sent) for d in item.deliveries())
        self._arriving = [item for item in self._arriving if item.alive]

    def settle(self) -> None:
        """Put what has arrived into its pages once all of a sequence has, or before when there was
        no room for more."""
        self._forget_dead()
        coming = []
        for item in self._arriving:
            early = self._full or all(d.is_ready() for d in item.deliveries())
            while early and item.kv and item.kv[0].is_ready():
                self._put_all(item, [item.kv.popleft()])
            if item.kv or not all(state.is_ready() for state in item.late):
                coming.append(item)
                continue
            self._put_all(item, item.late)
            item.sequence.kv_arrived = True
        self._arriving = coming

    def send_lower(self) -> None:
        self.send(("lower-kv",))

    def put_lower(self) -> None:
        """Put the KV of the lower layers, for which the device waits, but not the host."""
        self._put_kv("lower-kv")

    def send_upper(self) -> None:
        self.send(KV)

    def put_upper(self) -> None:
        """Put the rest of the KV, likewise; and send the states."""
        self._put_kv("upper-kv")
        self.send()
        for item in self._arriving:
            self._late.append(item)
            item.sequence.kv_arrived = True
        self._arriving = []

    def _put_kv(self, kind: PageKind) -> None:
        self._forget_dead()
        for item in self._arriving:
            while item.kv and item.kv[0].kind == kind:
                self._put_all(item, [item.kv.popleft()])
                self.send((kind,))

    def settle_states(self) -> None:
        """Put the states that came last: nothing in a step should have waited for them."""
        for item in self._late:
            self._put_all(item, item.late)
        self._late.clear()

    def _send_first(self) -> None:
        for item in self._expected:
            for delivery in item.first:
                self._send(delivery)
                if delivery.unsent:
                    return

    def _deliveries(self, item: _Arriving, kind: PageKind, parts: list[Part]) -> list[_Delivery]:
        """The calls that put these parts: of several parts only if two such calls are within the
        budget."""
        largest = max(parts, key=lambda part: len(part[0]), default=None)
        size = 1 if largest is None else _bytes(largest[1])
        item.pages[kind], rows = put_order(kind, parts, self._budget // (2 * size))
        return [_Delivery(kind, i, _bytes(some[0]), some) for i, some in enumerate(rows)]

    def _send(self, delivery: _Delivery, most: int | None = None) -> int:
        """Send as many of its parts as there is room for, and how many these are."""
        wanted = delivery.unsent[:most]
        room = (self._budget - self._in_flight) // delivery.size
        now = wanted[: max(room, int(self._in_flight == 0))]
        self._full = len(now) < len(wanted)
        if now:
            delivery.sent += self._runner.to_device(delivery.kind, now)
            del delivery.unsent[: len(now)]
            self._in_flight += delivery.size * len(now)
        if not self.overlap and delivery.kind in KV:
            jax.block_until_ready(delivery.sent)
        return len(now)

    def _put_all(self, item: _Arriving, deliveries: list[_Delivery]) -> None:
        for delivery in deliveries:
            while delivery.unsent:
                if not self._send(delivery):
                    self._make_room(delivery.size)
            pages = item.pages[delivery.kind][delivery.to]
            self._runner.put_pages(delivery.kind, pages, delivery.sent)
            self._in_flight -= delivery.size * len(delivery.sent)
            delivery.sent = []
            if delivery.kind == "states" and item.state is not None:
                item.state.arrived, item.state = True, None
        deliveries.clear()

    def _fetch(self, offload: Offload) -> dict[str, Any]:
        """The rows of a chunk: its KV by kind, and its group inputs by each piece's first row."""
        moved = "inputs" in self._runner.host_rows
        pieces = input_pieces(offload.chunk.with_inputs) if moved else []
        pages = {piece.start: offload.input_pages[piece.start : piece.stop] for piece in pieces}
        inputs = {at: self._runner.take_pages("inputs", some) for at, some in pages.items()}
        kv = {kind: self._runner.take_pages(kind, offload.pages) for kind in self._runner.kv_kinds}
        return {**kv, "inputs": inputs}


def _bytes(rows: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(rows))


def _state_part(load: StateLoad) -> Part:
    return np.array([load.slot], np.int32), load.chunk.states[load.depth]
