"""Where the tokens and states of a block's problems lie, and batches made of spans of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jhybrid.batch import DecodeBatch, PrefillBatch, ReplayBatch
from pallas_kernels import CONTINUE, NO_SLOT, Segments

from ..tasks.problem import Problem


class Span(NamedTuple):
    """Tokens [start, end) of a row, from the state in slot `load`.

    Slot `store` gets the state after `mark` tokens of the row.
    """

    row: int
    start: int
    end: int
    load: int
    store: int
    mark: int


@dataclass(frozen=True)
class Layout:
    """A block of at most `rows` problems. A call runs `tokens` of them, packed.

    Row n has pages for `length` tokens; and, where the prefix is masked, pages for the `tail`
    tokens behind it. Slot n holds the state at the end of its prefix, slot rows + n the arm's.
    """

    rows: int
    length: int
    tail: int
    tokens: int
    page_size: int

    @property
    def slots(self) -> int:
        return 2 * self.rows

    @property
    def pages(self) -> int:
        return self.rows * (self._row_pages + self._tail_pages)

    @property
    def _row_pages(self) -> int:
        return -(-self.length // self.page_size)

    @property
    def _tail_pages(self) -> int:
        return -(-self.tail // self.page_size)

    def page_table(self, *, masked: bool = False) -> Int[np.ndarray, "N P"]:
        """Pages of every row; `masked`, those behind which no prefix can be seen."""
        table = np.full((self.rows, self._row_pages), -1, np.int32)
        count, first = (self._tail_pages, self.rows * self._row_pages) if masked else (
            self._row_pages, 0)  # fmt: skip
        table[:, :count] = first + np.arange(self.rows * count).reshape(self.rows, count)
        return table


@dataclass(frozen=True, eq=False)
class Block:
    """Problems in the rows of a layout: their prompts with a right answer behind them."""

    problems: Sequence[Problem]
    layout: Layout

    @cached_property
    def ids(self) -> list[Int[np.ndarray, " T"]]:
        """The tokens of each row."""
        return [np.array((*p.prompt, *p.answer_ids), np.int32) for p in self.problems]

    @cached_property
    def boundaries(self) -> Int[np.ndarray, " N"]:
        """Where each row's prefix ends."""
        return self.by_row([p.boundary for p in self.problems])

    def by_row(self, values: Sequence[int]) -> Int[np.ndarray, " N"]:
        """One value a row; 0 in rows without a problem."""
        out = np.zeros(self.layout.rows, np.int32)
        out[: len(values)] = values
        return out

    def calls(self, spans: Iterable[Span]) -> Iterator[list[Span]]:
        """The spans, as many at once as one call runs; every span fits into a call."""
        group: list[Span] = []
        used = 0
        for span in spans:
            size = span.end - span.start
            if used + size > self.layout.tokens:
                yield group
                group, used = [], 0
            group.append(span)
            used += size
        if group:
            yield group

    def prefill(self, spans: Sequence[Span], *, write: bool, masked: bool = False) -> Any:
        """A PrefillBatch of the spans. `write`: their KV and group inputs are kept.

        `masked` puts what they write, and look for, where there is no prefix. Positions then count
        from its end: keys are rotated against queries by the distance alone.
        """
        table = self.layout.page_table(masked=masked)
        origins = self.boundaries if masked else np.zeros(self.layout.rows, np.int32)
        tokens, rows, positions, cu = self._packed(spans)
        positions = np.where(rows >= 0, positions - origins[rows], -1)
        slots = page_slots(table, rows, positions, self.layout.page_size)
        slots = slots if write else np.full_like(slots, -1)
        tables = np.full_like(table, -1)
        tables[: len(spans)] = table[[span.row for span in spans]]
        batch: Any = PrefillBatch
        return batch(tokens, positions, slots, cu, tables, self._segments(spans), slots)

    def replay(self, spans: Sequence[Span]) -> Any:
        """A ReplayBatch of the spans: their group inputs."""
        tokens, rows, positions, _ = self._packed(spans)
        slots = page_slots(self.layout.page_table(), rows, positions, self.layout.page_size)
        batch: Any = ReplayBatch
        return batch(tokens, slots, self._segments(spans))

    def decode(self, *, masked: bool = False) -> Any:
        """A DecodeBatch of all rows, each with its prompt behind it; see `prefill` for `masked`."""
        count = self.layout.rows
        ends = self.by_row([len(p.prompt) for p in self.problems])
        batch: Any = DecodeBatch
        return batch(
            token_ids=np.zeros(count, np.int32),
            positions=ends - self.boundaries if masked else ends,
            kv_slots=np.full(count, -1, np.int32),
            page_table=self.layout.page_table(masked=masked),
            state_slots=count + np.arange(count, dtype=np.int32),
        )

    def targets(self, spans: Sequence[Span]) -> Int[np.ndarray, " T"]:
        """The token behind each packed one; 0 where there is none."""
        out, at = np.zeros(self.layout.tokens, np.int32), 0
        for row, start, end, *_ in spans:
            after = self.ids[row][start + 1 : end + 1]
            out[at : at + len(after)] = after
            at += end - start
        return out

    def _packed(self, spans: Sequence[Span]) -> tuple[np.ndarray, ...]:
        """Token, row and position of each packed token (-1: padding), and the spans' borders."""
        tokens = np.zeros(self.layout.tokens, np.int32)
        rows, positions = np.full_like(tokens, -1), np.full_like(tokens, -1)
        cu, at = np.zeros(self.layout.rows + 1, np.int32), 0
        for n, (row, start, end, *_) in enumerate(spans):
            here = slice(at, at + end - start)
            tokens[here], rows[here] = self.ids[row][start:end], row
            positions[here] = np.arange(start, end)
            at += end - start
            cu[n + 1 :] = at
        return tokens, rows, positions, cu

    def _segments(self, spans: Sequence[Span]) -> Any:
        """Two for each span: up to its mark, and what follows, whose state nobody keeps."""
        count = 2 * self.layout.rows
        cu, at = np.zeros(count + 1, np.int32), 0
        load, store = np.full(count, NO_SLOT, np.int32), np.full(count, NO_SLOT, np.int32)
        for n, span in enumerate(spans):
            cu[2 * n + 1 :] = at + span.mark - span.start
            at += span.end - span.start
            cu[2 * n + 2 :] = at
            load[2 * n], store[2 * n] = span.load, span.store
            if span.end > span.mark:
                load[2 * n + 1] = CONTINUE
        segments: Any = Segments
        return segments(cu, load, store)


def page_slots(
    table: Int[np.ndarray, "N P"],
    rows: Int[np.ndarray, " T"],
    positions: Int[np.ndarray, " T"],
    page_size: int,
) -> Int[np.ndarray, " T"]:
    """Where the KV of these positions of these rows is; -1 where a position is negative."""
    at = np.maximum(positions, 0)
    slots = table[rows, at // page_size] * page_size + at % page_size
    return np.where(positions >= 0, slots, -1).astype(np.int32)
