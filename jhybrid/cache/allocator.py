"""Who holds which KV page and which native state slot: reference counts and owners, no arrays.

Every page and slot is free, held by the tree, or held by running requests only, and the three
counts add up to the total (`PoolCounts`). Allocation is all or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Owner = Literal["tree", "running"]
Pages = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class PoolCounts:
    """How many members of a pool are with whom; what the tree holds at all counts as `tree`."""

    total: int
    free: int
    tree: int
    running: int


class Companions(Protocol):
    """What belongs to pages and must go when they are freed."""

    def drop(self, pages: Pages) -> None: ...


class PageAllocator:
    """KV pages 0..total-1, each with a reference count per owner; free when both are zero."""

    def __init__(self, total: int, companions: Companions | None = None) -> None:
        if total < 1:
            raise ValueError(f"total pages must be at least 1, got {total}")
        self.total = total
        self._companions = companions
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)  # lowest free page on top
        self.free = total  # of the stack, from its bottom; what is above them means nothing
        self._refs: dict[Owner, NDArray[np.int64]] = {
            "tree": np.zeros(total, np.int64),
            "running": np.zeros(total, np.int64),
        }

    def allocate(self, n: int) -> NDArray[np.int32] | None:
        """`n` free pages with one `running` reference each, or None (and nothing changes)."""
        if n < 0:
            raise ValueError(f"number of pages must not be negative, got {n}")
        if n > self.free:
            return None
        pages = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self._refs["running"][pages] = 1
        return pages

    def retain(self, pages: Pages, owner: Owner) -> None:
        """One more reference on each page. Raises RuntimeError when one of them is free."""
        index = self._index(pages)
        if not index.size:
            return
        if (self._total_refs(index) == 0).any():
            raise RuntimeError(f"cannot retain free pages among {index.tolist()}")
        np.add.at(self._refs[owner], index, 1)

    def release(self, pages: Pages, owner: Owner) -> int:
        """One reference fewer on each page; returns how many became free.

        Raises RuntimeError, changing nothing, when `owner` does not hold one of them.
        """
        index = self._index(pages)
        if not index.size:
            return 0
        refs = self._refs[owner]
        np.subtract.at(refs, index, 1)
        if (refs[index] < 0).any():
            np.add.at(refs, index, 1)
            raise RuntimeError(f"{owner} does not hold every page of {index.tolist()}")
        freed = np.unique(index[self._total_refs(index) == 0])
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)
        if self._companions is not None:
            self._companions.drop(freed)
        return len(freed)

    def held_by(self, owner: Owner) -> NDArray[np.bool_]:
        """For each page, whether `owner` holds it."""
        return self._refs[owner] > 0

    @property
    def free_pages(self) -> NDArray[np.int32]:
        return self._stack[: self.free].copy()

    def reclaimable(self) -> int:
        """Pages that only the tree holds: an upper bound of what evicting could free."""
        return int(np.count_nonzero((self._refs["tree"] > 0) & (self._refs["running"] == 0)))

    def counts(self) -> PoolCounts:
        tree = int(np.count_nonzero(self._refs["tree"]))
        running = int(np.count_nonzero((self._refs["tree"] == 0) & (self._refs["running"] > 0)))
        return PoolCounts(self.total, self.free, tree, running)

    def check_integrity(self, owner: Owner, expected: NDArray[np.int64]) -> None:
        """Compares the references of `owner` with a recount, and the three counts with the total.

        Raises RuntimeError with the numbers.
        """
        wrong = np.flatnonzero(self._refs[owner] != expected)
        if wrong.size:
            page = int(wrong[0])
            have, want = int(self._refs[owner][page]), int(expected[page])
            raise RuntimeError(
                f"{wrong.size} pages have wrong {owner} references: page {page} has {have}, "
                f"counted {want}"
            )
        c = self.counts()
        if c.free + c.tree + c.running != c.total or len(np.unique(self.free_pages)) != c.free:
            raise RuntimeError(
                f"KV pages: {c.free} free + {c.tree} tree + {c.running} running != {c.total}"
            )

    def _index(self, pages: Pages) -> NDArray[np.intp]:
        index = np.asarray(pages, np.intp)
        if index.size and (index.min() < 0 or index.max() >= self.total):
            raise ValueError(f"pages must be in 0..{self.total - 1}, got {index.tolist()}")
        return index

    def _total_refs(self, index: NDArray[np.intp]) -> NDArray[np.int64]:
        return self._refs["tree"][index] + self._refs["running"][index]


class SlotAllocator:
    """State slots 0..total-1. A slot has one owner: who may write it, or the tree that keeps it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total slots must be at least 1, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owner: list[Owner | None] = [None] * total
        self._held: dict[Owner, int] = {"tree": 0, "running": 0}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """`n` slots owned by `running`, or None (and nothing changes)."""
        if n < 0:
            raise ValueError(f"number of slots must not be negative, got {n}")
        if n > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(n)]
        for slot in slots:
            self._owner[slot] = "running"
        self._held["running"] += n
        return slots

    def owner(self, slot: int) -> Owner | None:
        """Who holds it; None for a free slot. Raises ValueError outside the pool."""
        if not 0 <= slot < self.total:
            raise ValueError(f"slot must be in 0..{self.total - 1}, got {slot}")
        return self._owner[slot]

    def donate(self, slot: int) -> None:
        """From `running` to `tree`: nobody may write the slot from now on."""
        self._leave(slot, "running")
        self._owner[slot] = "tree"
        self._held["tree"] += 1

    def release(self, slot: int, owner: Owner) -> None:
        """Frees it. Raises RuntimeError when `owner` does not hold it."""
        self._leave(slot, owner)
        self._free.append(slot)

    def counts(self) -> PoolCounts:
        return PoolCounts(self.total, self.free, self._held["tree"], self._held["running"])

    def check_integrity(self, owner: Owner, expected: set[int]) -> None:
        """Compares the slots of `owner` with a recount, and the three counts with the total."""
        have = {slot for slot, who in enumerate(self._owner) if who == owner}
        if have != expected or len(have) != self._held[owner]:
            raise RuntimeError(
                f"slots of {owner}: {sorted(have)}, counted {sorted(expected)}, "
                f"recorded {self._held[owner]}"
            )
        c = self.counts()
        free = {slot for slot, who in enumerate(self._owner) if who is None}
        if c.free + c.tree + c.running != c.total or set(self._free) != free:
            raise RuntimeError(
                f"slots: {c.free} free + {c.tree} tree + {c.running} running != {c.total}"
            )

    def _leave(self, slot: int, owner: Owner) -> None:
        if self.owner(slot) != owner:
            raise RuntimeError(f"{owner} does not hold slot {slot}: {self._owner[slot] or 'free'}")
        self._owner[slot] = None
        self._held[owner] -= 1
