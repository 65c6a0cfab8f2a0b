"""The shape of the prefix tree: edges, splits, and the references it holds on KV pages.

Knows nothing of who uses a node and when it may go: that is `radix_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jhybrid.cache.allocator import PageAllocator, Pages
from jhybrid.cache.radix_node import Node, PageIds, Tokens, common_length


class RadixTree:
    """Nodes below an empty root, each with a reference on its pages."""

    def __init__(self, page_size: int, pages: PageAllocator) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.nodes = 0  # without the root
        empty = np.empty(0, np.int32)
        self.root = Node(serial=0, start=0, tokens=empty, pages=empty)
        self._pages = pages
        self._serial = 0

    def descend(self, tokens: Tokens, *, exact: bool) -> tuple[list[Node], int]:
        """The nodes that the longest cached prefix touches, root first, and its length.

        The last node may end after the prefix. With `exact` it ends before what is not.
        """
        path, length = [self.root], 0
        while length == path[-1].end and length < len(tokens):
            child = path[-1].children.get(int(tokens[length]))
            if child is None or (exact and not child.exact):
                break
            path.append(child)
            length += common_length(child.tokens, tokens[length:])
        return path, length

    def page_table(self, path: Sequence[Node], length: int) -> PageIds:
        """Pages that hold the KV of [0, length) of the path's tokens: the deepest node's win."""
        table = np.empty(-(-length // self.page_size), np.int32)
        for node in path:
            first = node.start // self.page_size
            room = len(table) - first
            table[first : first + len(node.pages)] = node.pages[:room]
        return table

    def path_to(self, node: Node) -> list[Node]:
        """The nodes from the root to this one."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def split(self, node: Node, depth: int) -> Node:
        """Cuts the edge at `depth` and returns the new upper part.

        The lower part stays the same object: locks, checkpoint and children are about its end.
        """
        parent, cut, size = node.parent, depth - node.start, self.page_size
        assert parent is not None and 0 < cut < len(node.tokens)
        first = node.start // size
        upper_pages = node.pages[: (depth - 1) // size + 1 - first]
        upper = self._new_node(parent, node.tokens[:cut], upper_pages)
        upper.used, upper.exact = node.used, node.exact
        own_from = depth // size - first  # a page across the border belongs to both
        self._pages.release(node.pages[:own_from], "tree")
        node.start, node.parent = depth, upper
        node.tokens, node.pages = node.tokens[cut:].copy(), node.pages[own_from:].copy()
        upper.children[int(node.tokens[0])] = node
        return upper

    def add_leaf(self, parent: Node, tokens: Tokens, page_table: Pages, exact: bool) -> Node:
        """Tokens after `parent`; `page_table` is that of the whole prefix."""
        first = parent.end // self.page_size
        last = (parent.end + len(tokens) - 1) // self.page_size
        node = self._new_node(parent, tokens, np.asarray(page_table[first : last + 1], np.int32))
        node.exact = exact and parent.exact
        return node

    def remove_leaf(self, node: Node) -> int:
        """Takes it out and returns how many pages became free."""
        parent = node.parent
        assert parent is not None and node.evictable
        del parent.children[int(node.tokens[0])]
        node.attached = False
        self.nodes -= 1
        return self._pages.release(node.pages, "tree")

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Recounts nodes and page references. Raises RuntimeError with the numbers."""
        refs = np.zeros(self._pages.total, np.int64)
        nodes = 0
        for node in self.walk():
            nodes += 1
            self._check_node(node)
            np.add.at(refs, node.pages, 1)
        self._pages.check_integrity("tree", refs)
        if nodes != self.nodes:
            raise RuntimeError(f"the tree has {nodes} nodes, recorded {self.nodes}")

    def _new_node(self, parent: Node, tokens: Tokens, pages: PageIds) -> Node:
        self._pages.retain(pages, "tree")
        self._serial += 1
        self.nodes += 1
        # Copies: a view would keep the whole array alive after the other part is evicted.
        node = Node(self._serial, parent.end, tokens.copy(), pages.copy(), parent)
        parent.children[int(tokens[0])] = node
        return node

    def _check_node(self, node: Node) -> None:
        parent, size = node.parent, self.page_size
        indices = (node.end - 1) // size + 1 - node.start // size
        if (
            parent is None
            or parent.end != node.start
            or parent.children.get(int(node.tokens[0])) is not node
            or len(node.pages) != indices
            or not node.attached
            or (node.exact and not parent.exact)
        ):
            raise RuntimeError(
                f"node [{node.start}, {node.end}) with {len(node.pages)} pages of {indices} "
                "does not fit its place"
            )
