"""Random operations on the two-tier tree against a dictionary: 100 000 of them.

The dictionary maps each prefix that has a state to its representation, least recently used first.
Every rule of appendix B.2 is written out on it once more, without slots, indices or queues.
"""

from __future__ import annotations

import random

import pytest

from jhybrid.cache.allocator import PageAllocator, SlotAllocator
from jhybrid.cache.radix_cache import RadixCache
from jhybrid.cache.radix_node import Checkpoint, Lock, Node
from jhybrid.cache.tiers import CheckpointTiers, Demotion

Prefix = tuple[int, ...]
PAGE = 2


class Model:
    """What must be there. `readers` counts the locks on a state."""

    def __init__(self, native: int, compressed: int):
        self.native, self.compressed = native, compressed
        self.states: dict[Prefix, str] = {}
        self.readers: dict[Prefix, int] = {}
        self.evicted = {"native_slots": 0, "compressed_slots": 0}
        self.running = 0  # native slots that requests hold

    def count(self, *representations: str) -> int:
        return sum(state in representations for state in self.states.values())

    @property
    def free_native(self) -> int:
        return self.native - self.running - self.count("dense", "demoting")

    @property
    def free_compressed(self) -> int:
        return self.compressed - self.count("compressed", "demoting")

    def pinned(self, prefix: Prefix) -> bool:
        return bool(self.readers.get(prefix)) or self.states[prefix] == "demoting"

    def use(self, prefix: Prefix) -> None:
        self.states[prefix] = self.states.pop(prefix)

    def store(self, prefix: Prefix) -> bool:
        if prefix in self.states:
            self.use(prefix)
            return False
        self.states[prefix] = "demoting" if self.free_compressed else "dense"
        return True

    def evict(self, prefix: Prefix) -> None:
        tier = "compressed_slots" if self.states.pop(prefix) == "compressed" else "native_slots"
        self.evicted[tier] += 1

    def reclaim(self, wanted: int) -> None:
        while self.free_native + self.count("demoting") < wanted:
            eligible = [p for p in self.states if not self.pinned(p)]
            dense = [p for p in eligible if self.states[p] == "dense"]
            if not dense:
                return
            if self.free_compressed:
                self.states[dense[0]] = "demoting"
            elif eligible[0] == dense[0]:
                self.evict(eligible[0])
            else:
                self.evict(eligible[0])
                self.states[dense[0]] = "demoting"


class Pair:
    """The cache and its model, given the same operations."""

    def __init__(self, seed: int, native: int, compressed: int):
        self.rng = random.Random(seed)
        self.pages = PageAllocator(400)
        self.native, self.compressed = SlotAllocator(native), SlotAllocator(compressed)
        self.tiers = CheckpointTiers(self.native, self.compressed)
        self.cache = RadixCache(PAGE, self.pages, self.tiers)
        self.model = Model(native, compressed)
        self.names: dict[Node, Prefix] = {}
        self.locks: list[tuple[Lock, Prefix]] = []
        self.taken: list[Demotion] = []
        self.counts = dict.fromkeys(("commit", "held", "abort", "hit", "full"), 0)

    def draw(self) -> Prefix:
        """Six conversations of eight turns, of two tokens each."""
        rng = self.rng
        return (rng.randrange(6), *range(rng.randint(1, 8) * 2 - 1))

    def insert(self) -> None:
        prefix, model = self.draw(), self.model
        model.reclaim(1)
        self.tiers.reclaim(1)
        slots = self.native.allocate(1)
        assert (slots is not None) == (model.free_native > 0)
        if slots is None:
            self.counts["full"] += 1
            return
        table = self.pages.allocate(-(-len(prefix) // PAGE))
        assert table is not None
        inserted = self.cache.insert(prefix, table, Checkpoint(slots[0], len(prefix)))
        self.pages.release(table, "running")
        self.names[inserted.node] = prefix
        new = model.store(prefix)
        assert (inserted.refused is None) == new
        if not new:
            self.native.release(slots[0], "running")

    def hit(self) -> None:
        prefix, model = self.draw(), self.model
        match = self.cache.match(prefix, len(prefix))
        held = [p for p in model.states if prefix[: len(p)] == p and len(p) <= match.length]
        restored = max(held, key=len, default=())
        assert match.restored == len(restored)
        self.counts["hit"] += bool(restored)
        lock = self.cache.lock(match)
        self.cache.touch(lock)
        if restored:
            model.use(restored)
            model.readers[restored] = model.readers.get(restored, 0) + 1
        self.locks.append((lock, restored))

    def unlock(self) -> None:
        lock, restored = self.locks.pop(self.rng.randrange(len(self.locks)))
        self.cache.unlock(lock)
        if restored:
            self.model.readers[restored] -= 1

    def finish_demotion(self) -> None:
        """Some demotion that was taken: committed or, sometimes, aborted; in any order."""
        demotion = self.taken.pop(self.rng.randrange(len(self.taken)))
        prefix = self.names[demotion.node]
        if self.rng.random() < 0.2:
            self.cache.abort_demotion(demotion)
            self.model.states[prefix] = "dense"
            self.counts["abort"] += 1
        elif self.cache.commit_demotion(demotion):
            assert not self.model.readers.get(prefix)
            self.model.states[prefix] = "compressed"
            self.counts["commit"] += 1
        else:
            assert self.model.readers[prefix]
            self.taken.append(demotion)
            self.counts["held"] += 1

    def evict_leaf(self) -> None:
        """Which leaf goes is the tree's order of KV, tested elsewhere; here, that it may."""
        before = {node for node in self.cache.walk() if node.has_state}
        if self.cache.evict_leaf() is None:
            return
        for node in before:
            if not node.attached:
                assert not self.model.pinned(self.names[node])
                self.model.evict(self.names[node])

    def run_or_end(self) -> None:
        """A request takes a native slot, or one of them gives its own back."""
        if self.model.running and self.rng.random() < 0.5:
            slot = next(s for s in range(self.native.total) if self.native.owner(s) == "running")
            self.native.release(slot, "running")
            self.model.running -= 1
        elif self.native.free:
            self.native.allocate(1)
            self.model.running += 1

    def operate(self) -> None:
        rng = self.rng
        op = rng.random()
        if op < 0.3:
            self.insert()
        elif op < 0.5:
            self.hit() if len(self.locks) < 4 else self.unlock()
        elif op < 0.62 and self.locks:
            self.unlock()
        elif op < 0.7:
            wanted = rng.randint(0, self.native.total)
            self.model.reclaim(wanted)
            self.tiers.reclaim(wanted)
        elif op < 0.8:
            self.taken += self.tiers.take_demotions(rng.randint(1, 3))
        elif op < 0.93 and self.taken:
            self.finish_demotion()
        elif op < 0.96:
            self.evict_leaf()
        else:
            self.run_or_end()

    def compare(self) -> None:
        model, tiers = self.model, self.tiers
        found = [
            (self.names[node], node.checkpoint.representation)
            for node in tiers.order
            if node.checkpoint is not None
        ]
        assert found == list(model.states.items())
        assert self.native.free == model.free_native
        assert self.compressed.free == model.free_compressed
        assert tiers.evicted == model.evicted


@pytest.mark.parametrize(
    ("seed", "native", "compressed"), [(0, 4, 9), (1, 6, 3), (2, 2, 1), (3, 9, 6)]
)
def test_random_operations_agree_with_a_dictionary(seed, native, compressed):
    pair = Pair(seed, native, compressed)
    for step in range(25_000):
        pair.operate()
        pair.compare()
        if step % 50 == 0:
            pair.cache.check_integrity()
    assert min(pair.counts.values()) > 50, pair.counts
    assert min(pair.model.evicted.values()) > 50, pair.model.evicted
