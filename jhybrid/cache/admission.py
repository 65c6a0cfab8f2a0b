"""What a running request holds of the cache, and what the cache reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.allocator import PoolCounts
from jhybrid.cache.offload import Load, StateLoad
from jhybrid.cache.radix_node import Checkpoint, Lock, Node, PageIds, Refusal


@dataclass(eq=False)
class Admission:
    """The lease of one running request. The manager changes it; the engine reads it every step."""

    matched: int  # tokens whose KV is reused
    restored: int  # depth of the state to start from; 0: zero state
    source: Checkpoint | None  # that state, to be read and never written; None: zero
    slot: int  # the request's own slot
    page_table: PageIds  # of [0, ...), one entry a page; replaced when it grows
    page_copies: list[tuple[int, int]]  # (src, dst) to be copied before the first step
    input_copies: list[tuple[int, int]]  # likewise of their pages of group inputs
    write_from: int  # first position whose KV the request writes
    branch_depth: int | None  # where a checkpoint helps the next request that shares the prefix
    reason: str | None  # why restored < matched, or why nothing was matched
    lock: Lock
    loads: list[Load]  # pages that come from host memory
    state_load: StateLoad | None  # `source`, if it comes from there
    shared: int  # full pages of [0, shared) are the tree's
    known: int  # tokens at admission: the end of the prompt
    exact: bool  # no approximation in what it was given, nor in what it has computed
    strict: bool  # takes and gives only what is exact
    state_depth: int | None = None  # tokens the state in `slot` has consumed; None: not written

    def set_state_depth(self, depth: int) -> None:
        """Says that the state of `depth` tokens is written (dispatched) to `slot`."""
        if depth < 0:
            raise ValueError(f"state depth must not be negative, got {depth}")
        self.state_depth = depth


def count_held(
    leases: Iterable[Admission], pages: int
) -> tuple[NDArray[np.int64], Counter[Node], Counter[Node]]:
    """References on each page, locks on the KV and on the state of each node, by leases alone."""
    refs = np.zeros(pages, np.int64)
    locks: Counter[Node] = Counter()
    state_locks: Counter[Node] = Counter()
    for lease in leases:
        held = [*lease.page_table, *(src for src, _ in lease.page_copies)]
        np.add.at(refs, np.asarray(held, np.intp), 1)
        locks[lease.lock.node] += 1
        if lease.lock.checkpoint_node is not None:
            state_locks[lease.lock.checkpoint_node] += 1
    return refs, locks, state_locks


@dataclass(frozen=True)
class Commit:
    """Tokens [0, duplicate) were in the tree already, `new` ones follow.

    `refused` is why the tree did not take the state that was offered, None if it did.
    """

    new: int
    duplicate: int
    refused: Refusal | None


@dataclass(frozen=True)
class CacheStats:
    """Owners by pool, how many pages and checkpoints had to make room, and demotions by outcome."""

    pools: dict[str, PoolCounts]
    evictions: dict[str, int]
    demotions: dict[str, int]
