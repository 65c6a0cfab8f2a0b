"""Who owns what: counted for the metrics, recounted from tree and leases in the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.admission import Admission
from jhybrid.cache.allocator import PoolCounts
from jhybrid.cache.cache_pools import CachePools
from jhybrid.cache.radix_node import Node


@dataclass(frozen=True)
class CacheStats:
    """Owners by pool, how many pages and checkpoints had to make room, and demotions by outcome."""

    pools: dict[str, PoolCounts]
    evictions: dict[str, int]
    demotions: dict[str, int]


def pool_stats(pools: CachePools) -> CacheStats:
    tiers = pools.tiers
    counts = {"kv_pages": pools.pages.counts(), "native_slots": tiers.native.counts()}
    if tiers.compressed is not None:
        counts["compressed_slots"] = tiers.compressed.counts()
    evictions = {"kv_pages": pools.tree.evicted_pages, **tiers.evicted}
    if pools.inputs is not None:
        counts["group_inputs"] = pools.inputs.counts(pools.pages.held_by("tree"))
        evictions["group_inputs"] = pools.inputs.taken
    if pools.host is not None:
        counts["host_bytes"] = pools.host.counts()
        evictions["host_bytes"] = pools.host.evicted
    demotions = {"committed": tiers.committed, "aborted": tiers.aborted}
    return CacheStats(counts, evictions, demotions)


def check_integrity(pools: CachePools, leases: Collection[Admission]) -> None:
    """Recounts pages, slots and locks of tree and leases. RuntimeError with the numbers."""
    pools.tree.check_integrity()
    refs, locks, state_locks = _count_held(leases, pools.pages.total)
    pools.pages.check_integrity("running", refs)
    if pools.inputs is not None:
        pools.inputs.check_integrity(pools.pages.free_pages)
    if pools.host is not None:
        pools.host.check_integrity()
    if pools.slots.reserved and not leases:
        raise RuntimeError(f"slots {sorted(pools.slots.reserved)} are reserved for nobody")
    slots = [lease.slot for lease in leases] + list(pools.slots.reserved)
    pools.tiers.native.check_integrity("running", set(slots))
    if len(slots) != len(set(slots)):
        raise RuntimeError(f"requests and reservations share slots: {sorted(slots)}")
    for node in pools.tree.walk():
        held = locks[node], state_locks[node]
        if (node.locks, node.checkpoint_locks) != held:
            raise RuntimeError(f"{node} and its state should have {held} locks, by requests")


def _count_held(
    leases: Collection[Admission], pages: int
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
