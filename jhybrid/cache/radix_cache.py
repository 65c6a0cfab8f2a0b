"""The prefix cache: which token prefixes have KV pages, and where on them a state is kept.

Matching is granular to one token, for KV. A checkpoint sits at the end of a node only, and
inserting one splits the edge for it. Nothing here is an array on a device, and what the tree
names is never written again: not the KV of its tokens, not its slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jhybrid.cache.allocator import PageAllocator, Pages, SlotAllocator
from jhybrid.cache.radix_node import (
    Checkpoint,
    Insertion,
    Lock,
    Match,
    Node,
    PageIds,
    Refusal,
    Tokens,
)
from jhybrid.cache.radix_tree import RadixTree
from jhybrid.cache.recency import CheckpointOrder, LeafOrder


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token ids as int32, without a copy when they are that already."""
    return np.asarray(tokens, np.int32)


class RadixCache:
    """A radix tree over token ids that holds references on pages and owns checkpoint slots."""

    def __init__(self, page_size: int, pages: PageAllocator, slots: SlotAllocator) -> None:
        self.page_size = page_size
        self.evicted_pages = 0  # pages that became free by evicting leaves
        self.evicted_checkpoints = 0
        self._tree = RadixTree(page_size, pages)
        self._slots = slots
        self._clock = 0
        self._leaves = LeafOrder()
        self._checkpoints = CheckpointOrder()
        self._locked_checkpoints = 0

    @property
    def evictable_checkpoints(self) -> int:
        return len(self._checkpoints) - self._locked_checkpoints

    # Looking up

    def match(self, tokens: Sequence[int] | Tokens, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens. Changes nothing.

        Raises RuntimeError when a checkpoint on the way has another depth than its node.
        """
        path, length = self._tree.descend(as_tokens(tokens)[: max(limit, 0)])
        checkpoint_node: Node | None = None
        evicted = False  # whether there was a deeper one
        for node in path:
            if node.checkpoint is not None and node.end <= length:
                _check_depth(node)
                evicted = not node.has_state
                checkpoint_node = node if node.has_state else checkpoint_node
        restored = checkpoint_node.end if checkpoint_node else 0
        goes_on = length < path[-1].end or bool(path[-1].children)
        reason = "evicted" if evicted else "no_checkpoint"
        return Match(
            length=length,
            pages=self._tree.page_table(path, length),
            node=path[-1],
            checkpoint_node=checkpoint_node,
            branch_depth=length if goes_on and restored < length else None,
            reason=reason if restored < length else None,
        )

    def page_table(self, node: Node) -> PageIds:
        """Pages that hold the KV of [0, node.end)."""
        return self._tree.page_table(self._tree.path_to(node), node.end)

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        return self._tree.walk()

    # Using

    def lock(self, match: Match) -> Lock:
        """Pins the KV of [0, match.length) and the matched checkpoint until `unlock`.

        Splits the edge where the match ends, so that what lies deeper can still be evicted.
        Raises RuntimeError when something matched has been evicted in between.
        """
        node = match.node
        if not node.attached or (match.checkpoint_node and not match.checkpoint_node.has_state):
            raise RuntimeError(f"the match of {match.length} tokens is no longer in the tree")
        while node.parent is not None and match.length <= node.start:  # split in between
            node = node.parent
        if match.length < node.end:
            node = self._tree.split(node, match.length)
        node.locks += 1
        if match.checkpoint_node is not None:
            match.checkpoint_node.checkpoint_locks += 1
            self._locked_checkpoints += match.checkpoint_node.checkpoint_locks == 1
        return Lock(node, match.checkpoint_node)

    def unlock(self, lock: Lock) -> None:
        """Gives up everything the lock pins. It then pins the root, which is nothing."""
        self.unlock_checkpoint(lock)
        self.move_lock(lock, self._tree.root)

    def unlock_checkpoint(self, lock: Lock) -> None:
        """Gives up the checkpoint and keeps the KV pinned."""
        node, lock.checkpoint_node = lock.checkpoint_node, None
        if node is not None:
            node.checkpoint_locks -= 1
            self._locked_checkpoints -= node.checkpoint_locks == 0
            self._leaves.push(node, self._tree.nodes)

    def move_lock(self, lock: Lock, node: Node) -> None:
        """Pins the KV of another node's prefix instead."""
        old, lock.node = lock.node, node
        node.locks += 1
        old.locks -= 1
        self._leaves.push(old, self._tree.nodes)

    def touch(self, lock: Lock) -> None:
        """Marks a hit as used: the node that ends it, and the checkpoint taken.

        Not the ancestors: the states above are not what was used, and refreshing them would push
        out all of a colder conversation to keep several of a warm one.
        """
        self._use_kv(lock.node)
        if lock.checkpoint_node is not None:
            self._checkpoints.use(lock.checkpoint_node)

    # Changing

    def insert(
        self,
        tokens: Sequence[int] | Tokens,
        pages: Pages,
        checkpoint: Checkpoint | None = None,
    ) -> Insertion:
        """Adds [0, len(tokens)), whose KV `pages` hold, and makes a node end there.

        Takes references on the pages of the part that was not there. A checkpoint of that depth
        goes over to the tree, slot included, unless the node has one. Raises ValueError when the
        pages do not cover the tokens, RuntimeError when the slot is not a running request's.
        """
        tokens = as_tokens(tokens)
        if len(pages) * self.page_size < len(tokens):
            raise ValueError(
                f"{len(pages)} pages of {self.page_size} cannot hold {len(tokens)} tokens"
            )
        path, duplicate = self._tree.descend(tokens)
        node = path[-1]
        if duplicate < node.end:
            node = self._tree.split(node, duplicate)
        if duplicate < len(tokens):
            node = self._tree.add_leaf(node, tokens[duplicate:], pages)
        self._use_kv(node)
        refused = self._attach(node, checkpoint) if checkpoint is not None else None
        return Insertion(node, duplicate, refused)

    def evict_leaf(self) -> int | None:
        """Drops the least recently used leaf nobody uses, checkpoint included.

        Returns how many pages became free (0 when all are shared), None when there is no leaf.
        """
        node = self._leaves.pop()
        if node is None:
            return None
        self.evicted_checkpoints += node.has_state
        freed = self._remove_leaf(node)
        self.evicted_pages += freed
        return freed

    def evict_checkpoint(self) -> bool:
        """Drops the least recently used checkpoint nobody reads; its KV stays. False for none."""
        node = self._checkpoints.oldest_unlocked()
        if node is None:
            return False
        self._drop_checkpoint(node)
        self.evicted_checkpoints += 1
        return True

    def flush(self) -> None:
        """Drops all that nobody uses. Not counted as evictions."""
        while (leaf := self._leaves.pop()) is not None:
            self._remove_leaf(leaf)
        while (node := self._checkpoints.oldest_unlocked()) is not None:
            self._drop_checkpoint(node)

    def check_integrity(self) -> None:
        """Recounts everything the tree holds. Raises RuntimeError with the numbers."""
        self._tree.check_integrity()
        slots: set[int] = set()
        counted = {"checkpoints": 0, "locked_checkpoints": 0, "evictable_leaves": 0}
        for node in self.walk():
            _check_depth(node)
            counted["evictable_leaves"] += node.evictable
            if node.checkpoint is not None and node.has_state:
                slots.add(node.checkpoint.slot)
                counted["checkpoints"] += 1
                counted["locked_checkpoints"] += node.checkpoint_locks > 0
            elif node.checkpoint_locks:
                raise RuntimeError(f"{node.checkpoint_locks} users of no checkpoint at {node.end}")
        self._slots.check_integrity("tree", slots)
        order = {node for node in self._checkpoints if node.attached and node.has_state}
        recorded = {
            "checkpoints": len(self._checkpoints),
            "locked_checkpoints": self._locked_checkpoints,
            "evictable_leaves": len(self._leaves.nodes()),
        }
        if counted != recorded or not len(order) == len(slots) == counted["checkpoints"]:
            raise RuntimeError(
                f"counted {counted} in {len(slots)} slots, recorded {recorded}, "
                f"{len(order)} of them with a state"
            )

    def _use_kv(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._leaves.push(node, self._tree.nodes)

    def _attach(self, node: Node, checkpoint: Checkpoint) -> Refusal | None:
        if checkpoint.depth != node.end or checkpoint.depth == 0:
            return "depth"
        if node.has_state:
            # The same state, computed again: it is as young as if it had just been stored.
            self._checkpoints.use(node)
            return "duplicate"
        self._slots.donate(checkpoint.slot)
        node.checkpoint = checkpoint
        self._checkpoints.use(node)
        return None

    def _drop_checkpoint(self, node: Node) -> None:
        """The one place where a checkpoint ends, whatever its representation."""
        assert node.checkpoint is not None and node.checkpoint_locks == 0
        self._slots.release(node.checkpoint.slot, "tree")
        self._checkpoints.discard(node)
        node.checkpoint = Checkpoint(-1, node.end, "absent")

    def _remove_leaf(self, node: Node) -> int:
        if node.has_state:
            self._drop_checkpoint(node)
        freed = self._tree.remove_leaf(node)
        assert node.parent is not None
        self._leaves.push(node.parent, self._tree.nodes)
        return freed


def _check_depth(node: Node) -> None:
    if node.checkpoint is not None and node.checkpoint.depth != node.end:
        raise RuntimeError(f"a checkpoint of {node.checkpoint.depth} tokens is at {node.end}")
