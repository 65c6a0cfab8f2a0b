"""The two orders in which cached things leave: leaves by KV use, checkpoints by state use."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from jhybrid.cache.radix_node import Node


class LeafOrder:
    """Evictable leaves, least recently used first.

    A heap with lazy deletion: an entry counts while its node is evictable and has not been used
    since. Whoever makes a node evictable, or uses an evictable one, pushes it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def push(self, node: Node, nodes_in_tree: int) -> None:
        """Enters the node if it is evictable. O(log n), amortised over the clean-ups."""
        if not node.evictable:
            return
        heapq.heappush(self._heap, (node.used, node.serial, node))
        if len(self._heap) > 64 + 4 * nodes_in_tree:
            self._heap = [(n.used, n.serial, n) for n in self.nodes()]
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """Takes out the oldest evictable leaf, None when there is none."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if node.evictable and node.used == used:
                return node
        return None

    def nodes(self) -> set[Node]:
        """Every leaf that `pop` would find."""
        return {node for used, _, node in self._heap if node.evictable and node.used == used}


class CheckpointOrder:
    """Nodes with a checkpoint of any representation, least recently used first.

    Changing the representation is not a use and leaves the node where it is. Those in native slots
    (`dense` and `demoting`) are listed once more, in the same order, so that the oldest of them is
    found without a walk over all that is compressed.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._native: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    @property
    def native_count(self) -> int:
        return len(self._native)

    @property
    def native(self) -> list[Node]:
        """Those in native slots, in the same order."""
        return list(self._native)

    def enter(self, node: Node) -> None:
        """A new dense checkpoint, the youngest."""
        self._order[node] = self._native[node] = None

    def use(self, node: Node) -> None:
        """Makes it the youngest. O(1)."""
        self._order.move_to_end(node)
        if node in self._native:
            self._native.move_to_end(node)

    def leave_native(self, node: Node) -> None:
        """It is compressed now, and as old as it was."""
        del self._native[node]

    def discard(self, node: Node) -> None:
        del self._order[node]
        self._native.pop(node, None)

    def oldest(self) -> Node | None:
        """The oldest that is not pinned. O(1 + pinned ones older than it), and those are few: they
        were used when they were locked, or are being demoted."""
        return next((node for node in self._order if not node.pinned), None)

    def oldest_dense(self) -> Node | None:
        """The oldest in a native slot that is not pinned, likewise."""
        return next((node for node in self._native if not node.pinned), None)
