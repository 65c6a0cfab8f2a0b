"""The prefix cache: which token prefixes have KV pages, and where on them a state is kept.

Matching is granular to one token, for KV. A checkpoint sits at the end of a node only, and
inserting one splits the edge for it. Nothing here is an array on a device, and what the tree
names is never written again: not the KV of its tokens, not its slots.

KV and states computed from an approximate state are kept too, marked as not exact, and everything
below them is; a strict reader or writer stops before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from jhybrid.cache.allocator import PageAllocator, Pages
from jhybrid.cache.radix_node import (
    Checkpoint,
    Insertion,
    Lock,
    Match,
    Node,
    PageIds,
    Tokens,
)
from jhybrid.cache.radix_tree import RadixTree
from jhybrid.cache.recency import LeafOrder
from jhybrid.cache.tiers import CheckpointTiers, Demotion


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token ids as int32, without a copy when they are that already."""
    return np.asarray(tokens, np.int32)


class RadixCache:
    """A radix tree over token ids that holds references on pages, with checkpoints in `tiers`."""

    def __init__(self, page_size: int, pages: PageAllocator, tiers: CheckpointTiers) -> None:
        self.page_size = page_size
        self.tiers = tiers
        self.on_evict: Callable[[Node], None] | None = None  # told of a leaf before it goes
        self.evicted_pages = 0  # pages that became free by evicting leaves
        self._tree = RadixTree(page_size, pages)
        self._clock = 0
        self._leaves = LeafOrder()

    # Looking up

    def match(self, tokens: Sequence[int] | Tokens, limit: int, *, strict: bool = False) -> Match:
        """The longest cached prefix of at most `limit` tokens. Changes nothing.

        `strict` takes only exact KV and states that can be restored exactly. Raises RuntimeError
        when a checkpoint on the way has another depth than its node.
        """
        path, length = self._tree.descend(as_tokens(tokens)[: max(limit, 0)], exact=strict)
        checkpoint_node: Node | None = None
        reason = "no_checkpoint"  # what became of a deeper one
        for node in path:
            checkpoint = node.checkpoint
            if checkpoint is None or node.end > length:
                continue
            _check_depth(node)
            if not node.has_state:
                reason = "evicted"
            elif strict and not self.tiers.exact(checkpoint):
                reason = "not_exact"
            else:
                checkpoint_node, reason = node, "no_checkpoint"
        restored = checkpoint_node.end if checkpoint_node else 0
        last = path[-1]
        goes_on = length < last.end or (bool(last.children) and not last.has_state)
        source = checkpoint_node.checkpoint if checkpoint_node else None
        return Match(
            length=length,
            pages=self._tree.page_table(path, length),
            node=last,
            checkpoint_node=checkpoint_node,
            branch_depth=length if goes_on and restored < length else None,
            exact=last.exact and (source is None or self.tiers.exact(source)),
            reason=reason if restored < length else None,
        )

    def prefix(self, node: Node) -> Tokens:
        """The tokens [0, node.end)."""
        return np.concatenate([above.tokens for above in self._tree.path_to(node)])

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
            self.tiers.lock(match.checkpoint_node)
        return Lock(node, match.checkpoint_node)

    def unlock(self, lock: Lock) -> None:
        """Gives up everything the lock pins. It then pins the root, which is nothing."""
        self.unlock_checkpoint(lock)
        self.move_lock(lock, self._tree.root)

    def unlock_checkpoint(self, lock: Lock) -> None:
        """Gives up the checkpoint and keeps the KV pinned."""
        node, lock.checkpoint_node = lock.checkpoint_node, None
        if node is not None:
            self.tiers.unlock(node)
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
        node = lock.checkpoint_node
        if node is not None:
            assert node.checkpoint is not None
            node.checkpoint = replace(node.checkpoint, passing=False)
            self.tiers.use(node)

    # Changing

    def insert(
        self,
        tokens: Sequence[int] | Tokens,
        pages: Pages,
        checkpoint: Checkpoint | None = None,
        *,
        exact: bool = True,
        strict: bool = False,
    ) -> Insertion:
        """Adds [0, len(tokens)), whose KV `pages` hold, and makes a node end there.

        Takes references on the pages of the part that was not there. A checkpoint of that depth
        goes over to the tree, slot included, unless the node has one. `exact` says how the tokens
        were computed; below what is not exact nothing is, and `strict` adds nothing there. Raises
        ValueError when the pages do not cover the tokens, RuntimeError when the slot is not a
        running request's.
        """
        tokens = as_tokens(tokens)
        if len(pages) * self.page_size < len(tokens):
            raise ValueError(
                f"{len(pages)} pages of {self.page_size} cannot hold {len(tokens)} tokens"
            )
        path, duplicate = self._tree.descend(tokens, exact=strict)
        node = path[-1]
        if duplicate < node.end:
            node = self._tree.split(node, duplicate)
        blocked = strict and duplicate < len(tokens) and int(tokens[duplicate]) in node.children
        if duplicate < len(tokens) and not blocked:
            node = self._tree.add_leaf(node, tokens[duplicate:], pages, exact)
        self._use_kv(node)
        refused = None
        if checkpoint is not None:
            known = replace(checkpoint, exact=exact and node.exact)
            refused = self.tiers.attach(node, known)
        return Insertion(node, duplicate, refused)

    def evict_leaf(self) -> int | None:
        """Drops the least recently used leaf nobody uses, checkpoint included.

        Returns how many pages became free (0 when all are shared), None when there is no leaf.
        """
        node = self._leaves.pop()
        if node is None:
            return None
        if self.on_evict is not None:
            self.on_evict(node)
        if node.has_state:
            self.tiers.evict(node)
        freed = self._remove_leaf(node)
        self.evicted_pages += freed
        return freed

    def commit_demotion(self, demotion: Demotion) -> bool:
        """Makes the checkpoint a compressed one; False while somebody reads the dense one."""
        done = self.tiers.commit(demotion)
        self._leaves.push(demotion.node, self._tree.nodes)
        return done

    def abort_demotion(self, demotion: Demotion) -> None:
        """Leaves the checkpoint dense, as it was."""
        self.tiers.abort(demotion)
        self._leaves.push(demotion.node, self._tree.nodes)

    def flush(self) -> None:
        """Drops all that nobody uses. Not counted as evictions."""
        while (leaf := self._leaves.pop()) is not None:
            if leaf.has_state:
                self.tiers.drop(leaf)
            self._remove_leaf(leaf)
        while (node := self.tiers.order.oldest()) is not None:
            self.tiers.drop(node)

    def check_integrity(self) -> None:
        """Recounts everything the tree holds. Raises RuntimeError with the numbers."""
        self._tree.check_integrity()
        leaves = 0
        for node in self.walk():
            _check_depth(node)
            leaves += node.evictable
        self.tiers.check_integrity(self.walk())
        if leaves != len(self._leaves.nodes()):
            raise RuntimeError(f"{leaves} evictable leaves, listed {len(self._leaves.nodes())}")

    def _use_kv(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._leaves.push(node, self._tree.nodes)

    def _remove_leaf(self, node: Node) -> int:
        freed = self._tree.remove_leaf(node)
        assert node.parent is not None
        self._leaves.push(node.parent, self._tree.nodes)
        return freed


def _check_depth(node: Node) -> None:
    if node.checkpoint is not None and node.checkpoint.depth != node.end:
        raise RuntimeError(f"a checkpoint of {node.checkpoint.depth} tokens is at {node.end}")
