"""Which row of which rank's state lies where in a compressed slot: the index arrays of the movers.

Made once from plan, layout and placement, in numpy; the engine puts them on the devices, their
first axis cut over `tp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Int32

from .layout import Layout, rows_of
from .placement import StoragePlacement
from .selection import RetentionPlan


@struct.dataclass
class Exchange:
    """The remote part of balanced storage, in blocks of M rows for each rank (-1 pads).

    Block j of `send` are the state rows that are stored on rank j; block j of `receive` are the
    rows of this rank's slots that rank j's surplus fills.
    """

    send: Any  # [P, P * M] int32
    receive: Any  # [P, P * M] int32


@struct.dataclass
class MoveMaps:
    """Rows of the plan, one list a rank; axis 0 is cut over `tp`."""

    rows: Any  # [P, R] int32: the state row at each row of a slot; -1: padding, or remote
    positions: Any  # [P, N] int32: the row of a slot that holds each state row, or -1
    exchange: Exchange | None  # None where every unit is stored where it is computed


def make_maps(plan: RetentionPlan, layout: Layout, storage: StoragePlacement | None) -> MoveMaps:
    """Maps [P, ...] as numpy arrays. `storage` balances a ragged layout."""
    tp, units, exchange = len(layout.units), layout.units, None
    if storage is not None:
        mine = np.arange(storage.slot_units) < storage.kept[:, None]
        units = np.where(mine, units[:, : storage.slot_units], -1)
        if storage.remote:
            exchange = _make_exchange(layout, storage)
    rows = _at_least_one(rows_of(units, layout.unit_rows))
    positions = np.full((tp, plan.row_mask.size // tp), -1, np.int32)
    rank, place = np.nonzero(rows >= 0)
    positions[rank, rows[rank, place]] = place
    return MoveMaps(rows, positions, exchange)


def _at_least_one(rows: Int32[np.ndarray, "P R"]) -> Int32[np.ndarray, "P R"]:
    """Lists of no rows get one -1: an array of no rows can be neither read nor written."""
    return np.pad(rows, ((0, 0), (0, int(rows.shape[1] == 0))), constant_values=-1)


def _make_exchange(layout: Layout, storage: StoragePlacement) -> Exchange:
    tp = len(storage.kept)
    pair = storage.source.astype(np.int64) * tp + storage.target
    order = np.argsort(pair, kind="stable")  # by source, then target, then the paper's order
    counts = np.bincount(pair, minlength=tp * tp)
    place = np.empty_like(pair)
    place[order] = np.arange(len(pair)) - np.repeat(counts.cumsum() - counts, counts)
    send = np.full((tp, tp, counts.max()), -1, np.int32)
    receive = send.copy()
    send[storage.source, storage.target, place] = layout.units[storage.source, storage.unit]
    receive[storage.target, storage.source, place] = storage.position
    rows = (rows_of(x.reshape(tp, -1), layout.unit_rows) for x in (send, receive))
    return Exchange(*rows)
