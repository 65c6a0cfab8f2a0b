"""A prefix tree with its pools, and what the pages would hold."""

import numpy as np

from jhybrid.cache.allocator import PageAllocator, SlotAllocator
from jhybrid.cache.radix_cache import RadixCache
from jhybrid.cache.radix_node import Checkpoint, Insertion, Node
from jhybrid.cache.tiers import CheckpointTiers

PAGE = 4


class Bench:
    """A tree with its pools, and what the pages would hold."""

    def __init__(self, total_pages: int = 64, total_slots: int = 16):
        self.pages = PageAllocator(total_pages)
        self.slots = SlotAllocator(total_slots)
        self.tiers = CheckpointTiers(self.slots)
        self.cache = RadixCache(PAGE, self.pages, self.tiers)
        self.content = np.full((total_pages, PAGE), -1)

    def insert(self, tokens, state: bool = False, depth: int | None = None) -> Insertion:
        """As a request does that computed all of it in pages of its own, and ends."""
        table = self.pages.allocate(-(-len(tokens) // PAGE))
        assert table is not None
        for position, token in enumerate(tokens):
            self.content[table[position // PAGE], position % PAGE] = token
        checkpoint = None
        if state:
            slots = self.slots.allocate(1)
            assert slots is not None
            checkpoint = Checkpoint(slots[0], len(tokens) if depth is None else depth)
        inserted = self.cache.insert(tokens, table, checkpoint)
        if checkpoint is not None and inserted.refused:
            self.slots.release(checkpoint.slot, "running")
        self.pages.release(table, "running")
        self.cache.check_integrity()
        return inserted

    def evict_checkpoint(self) -> bool:
        """Makes room for one more; False when every checkpoint is in use."""
        before = self.slots.free
        self.tiers.reclaim(before + 1)
        return self.slots.free > before

    def spelled(self, pages, length: int) -> list[int]:
        """The tokens whose KV the page table holds."""
        return self.content[pages].reshape(-1)[:length].tolist()

    def node_at(self, tokens) -> Node:
        match = self.cache.match(tokens, len(tokens))
        assert match.length == len(tokens) == match.node.end
        return match.node
