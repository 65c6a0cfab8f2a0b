"""Companions for the pages of a lease: when it is admitted, while it grows, and for a replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.admission import Admission
from jhybrid.cache.cache_pools import CachePools
from jhybrid.cache.input_pages import NONE
from jhybrid.cache.offload import Load, loads
from jhybrid.cache.radix_node import PageIds


def give_inputs(pools: CachePools, lease: Admission) -> None:
    """Companions for the request's own pages: where they are wanted for the end of its prompt,
    and for the page it copies from the tree's if that has one."""
    assert pools.inputs is not None
    pools.inputs.use(lease.page_table)
    held = pools.pages.held_by("running")
    first = lease.shared // pools.page_size + sum(len(load.rows) for load in lease.loads)
    for source, page in lease.page_copies:
        first += 1
        if pools.inputs.kept([source]):
            pools.inputs.grant([page], held)
            if pools.inputs.kept([page]):
                old, new = pools.inputs.of([source, page]).tolist()
                lease.input_copies = [(old, new)]
    ends = (np.arange(first, len(lease.page_table)) + 1) * pools.page_size
    wanted = pools.inputs.policy.wanted(ends, lease.known)
    pools.inputs.grant(lease.page_table[first:][wanted], held)


def slide_inputs(pools: CachePools, lease: Admission, pages: PageIds, length: int) -> None:
    """Companions for pages of generated tokens; with a tail, the older ones of them go."""
    assert pools.inputs is not None
    pools.inputs.grant(pages, pools.pages.held_by("running"))
    index = np.arange(pools.pages_for(lease.known), len(lease.page_table) - len(pages))
    wanted = pools.inputs.policy.wanted((index + 1) * pools.page_size, length)
    pools.inputs.drop(lease.page_table[index[~wanted]])


def inputs_kept(pools: CachePools, lease: Admission, start: int, end: int) -> bool:
    """See `CacheManager.inputs_kept`."""
    if pools.inputs is None:
        return False
    first, last = start // pools.page_size, pools.pages_for(end)
    held, at = pools.pages.held_by("running"), lease.shared // pools.page_size
    for load in lease.loads:
        begin, at = at, at + len(load.rows)
        if at <= first or last <= begin:
            continue
        index = np.arange(begin, at)
        there = load.chunk.with_inputs[load.rows.start : load.rows.stop]
        coming = there & (first <= index) & (index < last) & (load.input_pages == NONE)
        if coming.any():
            pools.inputs.grant(load.pages[coming], held)
            load.input_pages[coming] = pools.inputs.of(load.pages[coming])
    index = np.arange(first, last)
    absent = index[pools.inputs.of(lease.page_table[index]) == NONE]
    return not len(absent) or _come_back(pools, lease, absent, end)


def _come_back(pools: CachePools, lease: Admission, absent: NDArray[np.int64], end: int) -> bool:
    """Pages of the tree whose inputs stayed in host memory when a shorter tail of them was
    replayed, or none: they get companions and loads of their own if all of them can."""
    assert pools.inputs is not None
    if pools.host is None:
        return False
    runs = pools.host.inputs_of(lease.tokens[:end], absent, strict=lease.strict)
    if runs is None:
        return False
    pages = lease.page_table[absent]
    pools.inputs.grant(pages, pools.pages.held_by("running"))
    companions = pools.inputs.of(pages)
    if (companions == NONE).any():
        pools.inputs.drop(pages)
        return False
    for load in loads(runs, companions):  # as of KV: into these pages, and nowhere else
        lease.input_loads.append(Load(load.chunk, load.rows, load.input_pages, load.pages))
    lease.exact = lease.exact and all(chunk.exact for chunk, _ in runs)
    return True
