"""Pages and states between the pools and the host store: what is to be copied, either way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.cache_pools import CachePools
from jhybrid.cache.host_store import Chunk
from jhybrid.cache.input_pages import NONE
from jhybrid.cache.radix_node import Node, PageIds


@dataclass(frozen=True, eq=False)
class Offload:
    """Evicted `pages` (and their companions, -1 for none) that `chunk` is to hold."""

    chunk: Chunk
    pages: PageIds
    input_pages: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StateOffload:
    """The state in native `slot`, which `chunk` is to hold as that of `depth`."""

    chunk: Chunk
    depth: int
    slot: int


@dataclass(eq=False)
class StateLoad:
    """A state of a chunk to be put into native `slot`, reserved for it; `arrived` once it has been
    (dispatched). `read`: the request starts from it; else it only is a checkpoint again."""

    chunk: Chunk
    depth: int
    slot: int
    read: bool = False
    arrived: bool = False


@dataclass(eq=False)
class Load:
    """Rows of a chunk to be put into KV pages, and their group inputs into `input_pages` (-1:
    nowhere)."""

    chunk: Chunk
    rows: range
    pages: PageIds
    input_pages: NDArray[np.int32]


def offloads(pools: CachePools, node: Node) -> Iterator[Offload | StateOffload]:
    """Enters the pages of a leaf that goes in the host store, where they are not yet; and those
    before them that make up a whole chunk, though they stay here: a prefix that goes node by
    node would leave small chunks, and they come back padded, in many small transfers."""
    assert pools.host is not None
    tokens, table = pools.tree.prefix(node), pools.tree.page_table(node)
    most = pools.host.chunk_rows
    for run in pools.host.missing(tokens, node.start // pools.page_size // most * most, node.exact):
        if not pools.host.fits(run):
            continue
        pages = table[run.start : run.stop]
        none = np.full(len(pages), NONE, np.int32)
        companions = none if pools.inputs is None else pools.inputs.of(pages)
        chunk = pools.host.add(tokens, run, companions != NONE, node.exact)
        yield Offload(chunk, pages, companions)
    state = node.checkpoint
    if state is None or state.representation != "dense" or not state.exact:
        return
    # A state takes as much as the KV of a thousand tokens or more: those that a long prompt
    # has left on its way stay behind.
    chunk = None if state.passing else pools.host.add_state(tokens)
    if chunk is not None:
        yield StateOffload(chunk, node.end, state.slot)


def loads(runs: Sequence[tuple[Chunk, range]], pages: PageIds) -> list[Load]:
    """Rows of chunks into the first of `pages`, in order; nowhere yet for their group inputs."""
    found, at = list[Load](), 0
    for chunk, rows in runs:
        to = pages[at : at + len(rows)]
        found.append(Load(chunk, rows, to, np.full_like(to, NONE)))
        at += len(rows)
    return found
