"""Transfers between the device's pools and pinned host memory.

What leaves: the pages are gathered on the device before any later step writes them, and the copy to
the host goes on behind. What comes back is sent at admission, group inputs first, and is put in its
pages by one more call: that of the group inputs at once, since the replay reads them, that of the
KV when it has arrived, so that no step waits for it; with nothing else running, the device waits
instead of the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..cache.admission import Admission
from ..cache.cache_manager import CacheManager
from ..cache.host_store import Chunk, padded_rows
from ..cache.offload import Load, Offload, StateOffload
from ..models.pages import PageKind
from .model_runner import ModelRunner
from .sequence import Sequence


@dataclass(frozen=True, eq=False)
class _Arriving:
    """KV on its way to the pages of a sequence admitted as `lease`."""

    sequence: Sequence
    lease: Admission
    parts: list[tuple[np.ndarray, Any]]  # target page of each row of a chunk, and the rows

    @property
    def alive(self) -> bool:
        return self.sequence.lease is self.lease

    def is_ready(self) -> bool:
        return all(leaf.is_ready() for _, rows in self.parts for leaf in jax.tree.leaves(rows))


class HostTier:
    """`overlap` False waits for each transfer where it is started (to measure what that costs)."""

    def __init__(self, cache: CacheManager, runner: ModelRunner) -> None:
        self._cache, self._runner = cache, runner
        self._arriving: list[_Arriving] = []
        self.overlap = True

    @property
    def arriving(self) -> int:
        return len(self._arriving)

    def offload(self) -> None:
        """Dispatch the copies of all pages and states that the cache has evicted."""
        for offload in self._cache.take_offloads():
            if isinstance(offload, StateOffload):
                state = self._runner.take_pages("states", np.array([offload.slot], np.int32))
                offload.chunk.states[offload.depth] = state
            else:
                offload.chunk.payload = self._fetch(offload)

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Send what newly admitted sequences have in host memory, all of it before any of it is
        used: a transfer may have to wait for programs that were dispatched before it."""
        for sequence in sequences:
            lease = sequence.lease
            if lease is None or not lease.loads:
                continue
            state = lease.state_load
            states = [state.chunk.states[state.depth]] if state else []
            arriving = self._runner.to_device("states", states)
            inputs = self._send("inputs", [(x, x.input_pages) for x in lease.loads])
            kv = self._send("kv", [(load, load.pages) for load in lease.loads])
            lease.loads = []
            self._arriving.append(_Arriving(sequence, lease, kv))
            for rows in arriving:
                assert state is not None
                self._runner.put_pages("states", rows, np.array([state.slot], np.int32))
            for targets, rows in inputs:
                self._runner.put_pages("inputs", rows, targets)
            if not self.overlap:
                jax.block_until_ready([rows for _, rows in kv])

    def settle(self, *, wait: bool) -> None:
        """Put what has arrived into its pages; with `wait` also what has not, which makes the
        device wait for it, but not the host."""
        coming = []
        for item in self._arriving:
            if not item.alive:
                continue
            if not (wait or item.is_ready()):
                coming.append(item)
                continue
            for targets, rows in item.parts:
                self._runner.put_pages("kv", rows, targets)
            item.sequence.kv_arrived = True
        self._arriving = coming

    def _fetch(self, offload: Offload) -> dict[str, Any]:
        payload = {"kv": self._runner.take_pages("kv", offload.pages)}
        if offload.chunk.with_inputs.any():
            payload["inputs"] = self._runner.take_pages("inputs", offload.input_pages)
        return payload

    def _send(
        self, kind: PageKind, loads: list[tuple[Load, np.ndarray]]
    ) -> list[tuple[np.ndarray, Any]]:
        """Whole chunks on their way, as one transfer, with the page that each row is for (-1:
        nowhere)."""
        targets: dict[Chunk, np.ndarray] = {}
        for load, pages in loads:
            if (pages >= 0).any():
                blank = np.full(padded_rows(load.chunk.rows), -1, np.int32)
                to = targets.setdefault(load.chunk, blank)
                to[load.rows.start : load.rows.stop] = pages
        rows = self._runner.to_device(kind, [chunk.payload[kind] for chunk in targets])
        return list(zip(targets.values(), rows, strict=True))
