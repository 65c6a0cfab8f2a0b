"""What a decode step is called with, kept on the device: in a steady decode the host sends nothing.

A line of a batch is a sequence. How far it is stands in its sampler row, which a draw advances:
position and slots of the next token follow from there. So a line changes only when another sequence
takes its place, or when it gets a page; and it changes in place. On a GPU a step is a graph, whose
nodes are updated when an array is not where it was: here all of them are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Int32

from pallas_kernels.ragged import or_outside

from ..batch import DecodeBatch
from ..packed import Packed, pack, unpack


@struct.dataclass
class DecodeLines:
    """N lines with tables of P pages; -1 in all of a padding line.

    `starts`: the position at which a row with no token generated would be (prompt length - 1).
    `input_pages`: the page of group inputs of the token that runs, -1 where they are not kept;
    None in caches without them.
    """

    rows: Int32[Array, " N"]
    starts: Int32[Array, " N"]
    page_table: Int32[Array, "N P"]
    state_slots: Int32[Array, " N"]
    input_pages: Int32[Array, " N"] | None = None


@struct.dataclass
class Drawn:
    """What a decode step reads of R sampler rows (see RowParams): it follows what was drawn."""

    last_token: Int32[Array, " R"]
    generated: Int32[Array, " R"]


def empty_lines(size: int, pages: int, *, group_inputs: bool) -> DecodeLines:
    """Padding only, in numpy: the canvas that real lines are drawn on."""

    def none(*shape: int) -> Any:
        return np.full(shape, -1, np.int32)

    inputs = none(size) if group_inputs else None
    return DecodeLines(none(size), none(size), none(size, pages), none(size), inputs)


def decode_batch(lines: DecodeLines, drawn: Drawn, page_size: int) -> DecodeBatch:
    """The tokens that were drawn last, each behind what its line holds."""
    used, row = lines.rows >= 0, jnp.maximum(lines.rows, 0)
    positions = jnp.where(used, lines.starts + drawn.generated[row], -1)
    page, offset = jnp.maximum(positions, 0) // page_size, positions % page_size

    def slots(pages: Array) -> Array:
        return jnp.where(pages >= 0, pages * page_size + offset, -1)

    pages = jnp.take_along_axis(lines.page_table, page[:, None], axis=1)[:, 0]
    return DecodeBatch(
        token_ids=drawn.last_token[row],
        positions=positions,
        kv_slots=slots(pages),
        page_table=lines.page_table,
        state_slots=lines.state_slots,
        input_slots=None if lines.input_pages is None else slots(lines.input_pages),
    )


def set_lines(old: DecodeLines, lines: Packed) -> DecodeLines:
    """Other lines in the place of the old ones."""
    del old
    return unpack(lines)


def add_pages(lines: DecodeLines, pages: Packed) -> DecodeLines:
    """Lines with other entries in their tables: an array [3, N] of lines (-1: none), columns and
    pages, and the pages of group inputs of all lines."""
    (line, column, page), input_pages = unpack(pages)
    at = or_outside(line, lines.rows.shape[0]), column
    table = lines.page_table.at[at].set(page, mode="drop")
    return replace(lines, page_table=table, input_pages=input_pages)


class LinesOnDevice:
    """The lines of one bucket, and what the device was told of them.

    Whether something is to be sent is a comparison of all that a step needs, not of what is thought
    to have changed: pages are also exchanged for the tree's, and companions come and go.
    """

    def __init__(self, empty: DecodeLines, call: Callable[[str, DecodeLines, Packed], Any]) -> None:
        """`empty` lines in numpy; `call` runs one of the two functions above, by its name."""
        self._empty, self._call = empty, call
        self._known: DecodeLines | None = None
        self._lines = empty

    def bring(self, wanted: DecodeLines) -> DecodeLines:
        """Lines on the device that hold what is `wanted`, which is in numpy, and whose tables may
        be narrower: entries behind, which no position reaches, are any."""
        if self._known is None or not self._add_pages(self._known, wanted):
            self._known = replace(wanted, page_table=_widened(wanted, self._empty))
            self._lines = self._call("set_lines", self._lines, pack(self._known))
        return self._lines

    def _add_pages(self, known: DecodeLines, wanted: DecodeLines) -> bool:
        """Whether lines are the same but for some pages, which the device has then."""
        if not _same_lines(known, wanted):
            return False
        table: Any = known.page_table
        size, width = wanted.page_table.shape
        line, column = np.nonzero(table[:, :width] != wanted.page_table)
        if len(line) > size:  # another sequence has all that one had, or pages were exchanged
            return False
        if len(line) or not _equal(known.input_pages, wanted.input_pages):
            page = wanted.page_table[line, column]
            at = np.full((3, size), -1, np.int32)
            at[:, : len(line)] = line, column, page
            packed = pack((at, wanted.input_pages))
            self._lines = self._call("add_pages", self._lines, packed)
            table[line, column] = page
            self._known = replace(known, input_pages=wanted.input_pages)
        return True


def _same_lines(known: DecodeLines, wanted: DecodeLines) -> bool:
    """Whether they are the same but for pages."""
    return (
        _equal(known.rows, wanted.rows)
        and _equal(known.starts, wanted.starts)
        and _equal(known.state_slots, wanted.state_slots)
    )


def _equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if one is not None else other is None


def _widened(lines: DecodeLines, empty: DecodeLines) -> Any:
    table: Any = np.copy(empty.page_table)
    table[:, : lines.page_table.shape[1]] = lines.page_table
    return table
