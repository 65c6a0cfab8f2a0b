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

    Changing the representation is not a use and must leave the node where it is.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    def use(self, node: Node) -> None:
        """Makes it the youngest, entering it if it is new. O(1)."""
        self._order[node] = None
        self._order.move_to_end(node)

    def discard(self, node: Node) -> None:
        self._order.pop(node, None)

    def oldest_unlocked(self) -> Node | None:
        """O(1 + locked ones), and those are young: they were used when they were locked."""
        return next((node for node in self._order if node.checkpoint_locks == 0), None)
