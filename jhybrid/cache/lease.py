"""Admission of one request: all that it needs of the pools, or nothing."""

from __future__ import annotations

import numpy as np

from jhybrid.cache.admission import Admission
from jhybrid.cache.cache_pools import CachePools
from jhybrid.cache.host_store import Chunk, HostMatch
from jhybrid.cache.lease_inputs import give_inputs
from jhybrid.cache.offload import StateLoad, loads
from jhybrid.cache.radix_node import Checkpoint, Match, PageIds, Tokens


def take_lease(
    pools: CachePools,
    match: Match,
    host: HostMatch,
    tokens: Tokens,
    tokens_total: int,
    reason: str | None,
    strict: bool,
) -> Admission | None:
    """Locks what was matched, and takes a slot and pages for [0, tokens_total) of a request that
    begins with `tokens`. None when there is no room now, with nothing held."""
    lock = pools.tree.lock(match)  # first: making room must not take what was matched
    shared = match.length // pools.page_size
    needed = pools.pages_for(max(host.length, tokens_total)) - shared
    pages = slot = None
    if pools.slots.waits:  # evicting pages would be too early
        pools.slots.make_room()
    else:
        pages = pools.take_pages(needed)
        slot = pools.slots.take() if pages is not None else None
    if pages is None or slot is None:
        pools.pages.release(() if pages is None else pages, "running")
        pools.tree.unlock(lock)
        return None
    coming = loads(host.runs, pages)
    copied = match.length % pools.page_size and not coming
    copies = [(int(match.pages[-1]), int(pages[0]))] if copied else []
    pools.pages.retain(match.pages[:shared], "running")
    pools.pages.retain([src for src, _ in copies], "running")
    pools.tree.touch(lock)
    lease = Admission(
        matched=host.length,
        restored=match.restored,
        source=match.checkpoint_node.checkpoint if match.checkpoint_node else None,
        slot=slot,
        page_table=joined(match.pages[:shared], pages),
        page_copies=copies,
        input_copies=[],
        write_from=host.length,
        branch_depth=match.branch_depth,
        reason=reason or ("no_checkpoint" if match.restored < host.length else None),
        lock=lock,
        loads=coming,
        input_loads=[],
        state_load=None,
        shared=match.length,
        tokens=tokens,
        exact=match.exact and host.exact,
        strict=strict,
    )
    if pools.inputs is not None:
        give_inputs(pools, lease)
    if host.state is not None and host.state[1] > match.restored:
        _load_state(pools, lease, *host.state)
    if coming and lease.restored < lease.matched:
        lease.branch_depth = lease.matched
    return lease


def _load_state(pools: CachePools, lease: Admission, chunk: Chunk, depth: int) -> None:
    """A deeper state than the tree's, if there is a slot for it to come to."""
    for slot in pools.slots.reserve(1):
        lease.state_load = StateLoad(chunk, depth, slot)
        lease.source, lease.restored = Checkpoint(slot, depth), depth
        lease.reason = "no_checkpoint" if depth < lease.matched else None


def joined(pages: PageIds, more: PageIds) -> PageIds:
    return np.concatenate([pages, more])
