"""How many rows the programs between pools and host memory move, how many parts in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..cache.host_store import CHUNK_ROWS, PIECE_ROWS
from ..models.pages import PageKind
from .buckets import bucket

Part = tuple[np.ndarray, Any]  # the page that each of some rows goes to (-1: nowhere), and the rows

ROW_SIZES: dict[PageKind, tuple[int, ...]] = {
    "kv": CHUNK_ROWS,
    "inputs": tuple(rows for rows in CHUNK_ROWS if rows <= PIECE_ROWS),
    "states": (1,),
}
PUTS: dict[PageKind, tuple[int, ...]] = {  # parts that one call puts in their pages
    "kv": (1, 2, 4, 8, 16),
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


def put_calls(kind: PageKind, parts: list[Part]) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Calls of those sizes that put all parts: pages [parts, rows], and the rows of each part."""
    largest = ROW_SIZES[kind][-1]
    whole = [part for part in parts if len(part[0]) == largest]
    for part in parts:
        if len(part[0]) != largest:
            yield part[0][None], [part[1]]
    most = PUTS[kind][-1]
    for start in range(0, len(whole), most):
        some = whole[start : start + most]
        pages = np.full((bucket(PUTS[kind], len(some)), largest), -1, np.int32)
        pages[: len(some)] = [to for to, _ in some]
        rows = [rows for _, rows in some]
        yield pages, rows + rows[:1] * (len(pages) - len(rows))  # which go nowhere again
