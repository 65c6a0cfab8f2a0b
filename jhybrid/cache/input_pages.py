"""Which page of group inputs goes with which KV page: its companion. No arrays on a device.

A KV page gets its companion, if at all, before any of its tokens runs, and then holds the group
inputs of all of them; so a page says of each of its tokens whether its inputs are kept. It loses
the companion when it is freed, when its tokens are too far before a boundary (`tail`), or when
another page needs one and it is the least recently used that no request holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jhybrid.cache.allocator import Pages, PoolCounts

NONE = -1


@dataclass(frozen=True)
class InputPolicy:
    """Whose inputs are kept: of all tokens, or of the last `tail` before the end of a prompt and
    before the end of a request. `pages`: how many pages of them there are."""

    pages: int
    tail: int | None = None

    def wanted(self, ends: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
        """Whether pages whose last token is before `ends` are kept for a boundary at `length`."""
        return ends > (0 if self.tail is None else length - self.tail)


class InputPages:
    """Companions 0..policy.pages-1 of KV pages 0..kv_pages-1."""

    def __init__(self, policy: InputPolicy, kv_pages: int) -> None:
        if policy.pages < 1:
            raise ValueError(f"group input pages must be at least 1, got {policy.pages}")
        self.policy = policy
        self.taken = 0  # companions that another page took
        self._of = np.full(kv_pages, NONE, np.int32)
        self._used = np.zeros(kv_pages, np.int64)  # when, on a clock that counts pages
        self._clock = 0
        self._free = list(range(policy.pages - 1, -1, -1))

    def of(self, pages: Pages) -> NDArray[np.int32]:
        """The companion of each KV page, NONE where it has none."""
        return self._of[np.asarray(pages, np.intp)]

    def kept(self, pages: Pages) -> bool:
        """Whether the inputs of all tokens of these pages are there."""
        return bool((self.of(pages) != NONE).all())

    def use(self, pages: Pages) -> None:
        """Makes them the youngest, the last of them the youngest of all."""
        self._used[np.asarray(pages, np.intp)] = self._clock + np.arange(len(pages))
        self._clock += len(pages)

    def grant(self, pages: Pages, held: NDArray[np.bool_]) -> None:
        """Companions for new pages, the first ones if there are not enough; none is taken from a
        `held` page, nor from another of these."""
        short = len(pages) - len(self._free)
        if short > 0:
            victims = np.flatnonzero((self._of != NONE) & ~held)
            victims = victims[np.argsort(self._used[victims])][:short]
            self.drop(victims)
            self.taken += len(victims)
        granted = np.asarray(pages, np.intp)[: len(self._free)]
        if len(granted):
            self._of[granted] = self._free[: -len(granted) - 1 : -1]
            del self._free[-len(granted) :]
            self.use(granted)

    def drop(self, pages: Pages) -> None:
        """The inputs of these pages are kept no longer."""
        index = np.asarray(pages, np.intp)
        index = index[self._of[index] != NONE]
        self._free.extend(self._of[index].tolist())
        self._of[index] = NONE

    def counts(self, tree: NDArray[np.bool_]) -> PoolCounts:
        """Companions by who holds their pages; `tree` marks the tree's."""
        of_tree = int(np.count_nonzero(tree & (self._of != NONE)))
        running = self.policy.pages - len(self._free) - of_tree
        return PoolCounts(self.policy.pages, len(self._free), of_tree, running)

    def check_integrity(self, free_pages: NDArray[np.int32]) -> None:
        """Recounts companions. Raises RuntimeError with the numbers."""
        owned = self._of[self._of != NONE].tolist()
        of_free = int(np.count_nonzero(self._of[free_pages] != NONE))
        everything = sorted([*owned, *self._free])
        if everything != list(range(self.policy.pages)) or of_free:
            raise RuntimeError(
                f"group inputs: {len(owned)} pages owned ({of_free} by free KV pages) + "
                f"{len(self._free)} free != {self.policy.pages}"
            )
