"""How many rows the programs between pools and host memory move, how many parts in one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache.host_store import CHUNK_ROWS, PIECE_ROWS, Chunk, input_pieces, padded_rows
from ..cache.offload import Load
from ..models.pages import PageKind
from .buckets import bucket

Part = tuple[np.ndarray, Any]  # the page that each of some rows goes to (-1: nowhere), and the rows

ROW_SIZES: dict[PageKind, tuple[int, ...]] = {
    "lower-kv": CHUNK_ROWS,
    "upper-kv": CHUNK_ROWS,
    "inputs": tuple(rows for rows in CHUNK_ROWS if rows <= PIECE_ROWS),
    "states": (1,),
}
PUTS: dict[PageKind, tuple[int, ...]] = {  # parts that one call puts in their pages
    "lower-kv": (1, 2, 4, 8, 16),
    "upper-kv": (1, 2, 4, 8, 16),
    "inputs": (1, 2, 4, 8, 16),
    "states": (1,),
}


def put_sizes(kind: PageKind) -> list[tuple[int, int]]:
    """(parts, rows of each) of the calls there are: several at once are of the largest size."""
    *small, largest = ROW_SIZES[kind]
    return [*((1, rows) for rows in small), *((parts, largest) for parts in PUTS[kind])]


def put_name(kind: PageKind, parts: int) -> str:
    """Of the function that puts so many parts."""
    return f"put-{kind}" if parts == 1 else f"put-{kind}-{parts}"


def put_order(
    kind: PageKind, parts: list[Part], most: int
) -> tuple[list[np.ndarray], list[list[Any]]]:
    """Calls of those sizes, of about `most` parts at most, that put all parts: the pages of each
    [parts, rows], and the rows of its parts. The last call may have places for more than these."""
    most = max((count for count in PUTS[kind] if count <= most), default=PUTS[kind][0])
    largest = ROW_SIZES[kind][-1]
    small = [part for part in parts if len(part[0]) != largest]
    whole = [part for part in parts if len(part[0]) == largest]
    pages, rows = [to[None] for to, _ in small], [[part] for _, part in small]
    for start in range(0, len(whole), most):
        some = whole[start : start + most]
        grid = np.full((bucket(PUTS[kind], len(some)), largest), -1, np.int32)
        grid[: len(some)] = [to for to, _ in some]
        pages.append(grid)
        rows.append([part for _, part in some])
    return pages, rows


def input_parts(loads: list[Load]) -> list[Part]:
    """The pieces of chunks with group inputs that are wanted, and their pages."""
    parts = list[Part]()
    some = [load for load in loads if (load.input_pages >= 0).any()]
    for chunk, to in chunk_pages(some, [load.input_pages for load in some]).items():
        for piece in input_pieces(to[: chunk.rows] >= 0):
            pages = np.full(padded_rows(len(piece)), -1, np.int32)
            pages[: len(piece)] = to[piece.start : piece.stop]
            parts.append((pages, chunk.payload["inputs"][piece.start]))
    return parts


def chunk_pages(loads: list[Load], pages: list[np.ndarray]) -> dict[Chunk, np.ndarray]:
    """For each row of each chunk, padded, the page that it goes to."""
    targets = dict[Chunk, np.ndarray]()
    for load, to in zip(loads, pages, strict=True):
        blank = np.full(padded_rows(load.chunk.rows), -1, np.int32)
        targets.setdefault(load.chunk, blank)[load.rows.start : load.rows.stop] = to
    return targets
