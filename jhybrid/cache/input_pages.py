"""Which page of group inputs goes with which KV page: its companion. No arrays on a device.

A KV page gets its companion, if at all, before any of its tokens runs, and then holds the group
inputs of all of them; so a page says of each of its tokens whether its inputs are kept. It loses
the companion when it is freed, when its tokens are too far before a boundary (`tail`), or when
another page needs one and it is the least recently used that no request holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.allocator import PoolCounts

NONE = -1


@dataclass(frozen=True)
class InputPolicy:
    """Whose inputs are kept: of all tokens, or of the last `tail` before the end of a prompt and
    before the end of a request. `pages`: how many pages of them there are."""

    pages: int
    tail: int | None = None

    def wanted(self, end: int, length: int) -> bool:
        """Whether a page whose last token is before `end` is kept for a boundary at `length`."""
        return self.tail is None or end > length - self.tail


class InputPages:
    """Companions 0..policy.pages-1 of KV pages 0..kv_pages-1."""

    def __init__(self, policy: InputPolicy, kv_pages: int) -> None:
        if policy.pages < 1:
            raise ValueError(f"group input pages must be at least 1, got {policy.pages}")
        self.policy = policy
        self.taken = 0  # companions that another page took
        self._of = np.full(kv_pages, NONE, np.int32)
        self._free = list(range(policy.pages - 1, -1, -1))
        self._used: OrderedDict[int, None] = OrderedDict()  # KV pages, least recently used first

    def of(self, pages: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """The companion of each KV page, NONE where it has none."""
        return self._of[np.asarray(pages, np.intp)]

    def kept(self, pages: Sequence[int] | NDArray[np.int32]) -> bool:
        """Whether the inputs of all tokens of these pages are there."""
        return bool((self.of(pages) != NONE).all())

    def use(self, pages: Iterable[int]) -> None:
        """Makes them the youngest."""
        for page in pages:
            if page in self._used:
                self._used.move_to_end(page)

    def grant(self, pages: Iterable[int], held: NDArray[np.bool_]) -> None:
        """Companions for new pages, as far as there are; none is taken from a `held` page."""
        for page in pages:
            if not self._free:
                victim = next((p for p in self._used if not held[p]), None)
                if victim is None:
                    return
                self.drop([victim])
                self.taken += 1
            self._of[page] = self._free.pop()
            self._used[page] = None

    def drop(self, pages: Iterable[int]) -> None:
        """The inputs of these pages are kept no longer."""
        for page in pages:
            companion = int(self._of[page])
            if companion != NONE:
                self._free.append(companion)
                self._of[page] = NONE
                del self._used[page]

    def counts(self, tree: NDArray[np.bool_]) -> PoolCounts:
        """Companions by who holds their pages; `tree` marks the tree's."""
        of_tree = int(np.count_nonzero(tree & (self._of != NONE)))
        running = len(self._used) - of_tree
        return PoolCounts(self.policy.pages, len(self._free), of_tree, running)

    def check_integrity(self, free_pages: Iterable[int]) -> None:
        """Recounts companions. Raises RuntimeError with the numbers."""
        owned = self._of[self._of != NONE].tolist()
        of_free = int(np.count_nonzero(self._of[list(free_pages)] != NONE))
        everything = sorted([*owned, *self._free])
        if everything != list(range(self.policy.pages)) or of_free or len(owned) != len(self._used):
            raise RuntimeError(
                f"group inputs: {len(owned)} pages owned ({of_free} by free KV pages, "
                f"{len(self._used)} listed) + {len(self._free)} free != {self.policy.pages}"
            )
