"""Pages and states between the pools and the host store: what is to be copied, either way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.host_store import Chunk
from jhybrid.cache.radix_node import PageIds


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


@dataclass(frozen=True, eq=False)
class StateLoad:
    """A state of a chunk to be put into native `slot`, reserved for it."""

    chunk: Chunk
    depth: int
    slot: int


@dataclass(eq=False)
class Load:
    """Rows of a chunk to be put into KV pages, and their group inputs into `input_pages` (-1:
    nowhere)."""

    chunk: Chunk
    rows: range
    pages: PageIds
    input_pages: NDArray[np.int32]
