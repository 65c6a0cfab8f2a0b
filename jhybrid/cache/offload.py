"""Pages between the pools and the host store: what is to be copied, either way."""

from __future__ import annotations

from dataclasses import dataclass

from jhybrid.cache.host_store import Chunk


@dataclass(frozen=True, eq=False)
class Offload:
    """Evicted `pages` (and their companions, -1 for none) that `chunk` is to hold."""

    chunk: Chunk
    pages: list[int]
    input_pages: list[int]


@dataclass(eq=False)
class Load:
    """A row of a chunk to be put into a KV page, and its group inputs into `input_page`, if any."""

    chunk: Chunk
    row: int
    page: int
    input_page: int | None = None
