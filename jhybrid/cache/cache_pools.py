"""What one server has to cache in, and the tree and the host store that say what is in it."""

from __future__ import annotations

from dataclasses import dataclass

from jhybrid.cache.allocator import PageAllocator
from jhybrid.cache.host_store import HostStore
from jhybrid.cache.input_pages import InputPages
from jhybrid.cache.native_slots import NativeSlots
from jhybrid.cache.radix_cache import RadixCache
from jhybrid.cache.radix_node import PageIds
from jhybrid.cache.tiers import CheckpointTiers


@dataclass(frozen=True, eq=False)
class CachePools:
    """Without leases: `cache_manager` has those. `inputs` None: group inputs are not kept."""

    page_size: int
    pages: PageAllocator
    tiers: CheckpointTiers
    slots: NativeSlots
    tree: RadixCache
    inputs: InputPages | None
    host: HostStore | None

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take_pages(self, n: int) -> PageIds | None:
        """Pages for a request, evicting least recently used leaves; None if they would not do."""
        if n > self.pages.free and n > self.pages.free + self.pages.reclaimable():
            return None  # evicting everything would not do: keep it
        while self.pages.free < n:
            if self.tree.evict_leaf() is None:
                return None
        return self.pages.allocate(n)
