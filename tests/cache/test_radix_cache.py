"""The prefix tree against right values, and against a dictionary of prefixes on random tokens."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jhybrid.cache.allocator import PageAllocator, SlotAllocator
from jhybrid.cache.radix_cache import RadixCache
from jhybrid.cache.radix_node import Checkpoint, Insertion, Lock, Node, common_length
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


def test_match_is_granular_to_one_token():
    bench = Bench()
    tokens = list(range(10))
    bench.insert(tokens)
    for limit in range(12):
        match = bench.cache.match(tokens, limit)
        assert match.length == min(limit, 10)
        assert bench.spelled(match.pages, match.length) == tokens[:limit]
        assert len(match.pages) == -(-match.length // PAGE)
    assert bench.cache.match([0, 1, 9], 3).length == 2
    assert bench.cache.match([9], 1).length == 0
    assert bench.cache.match([], 0).length == 0


def test_a_branch_inside_a_page_has_its_own_copy():
    bench = Bench()
    bench.insert([0, 1, 2, 3, 4, 5, 6, 7])
    bench.insert([0, 1, 2, 3, 4, 50, 60])
    for tokens in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 50, 60]):
        match = bench.cache.match(tokens, 8)
        assert bench.spelled(match.pages, match.length) == tokens
    # page 0 once, page 1 for [4, 5) and [5, 8) once, its copy for [5, 7): three
    assert bench.pages.counts().tree == 3


def test_a_split_inside_a_page_shares_it():
    bench = Bench()
    bench.insert([0, 1, 2, 3, 4, 5, 6, 7])
    bench.insert([0, 1, 2, 3, 4, 5], state=True)
    upper = bench.node_at([0, 1, 2, 3, 4, 5])
    lower = bench.node_at([0, 1, 2, 3, 4, 5, 6, 7])
    assert (upper.start, upper.end, lower.start, lower.end) == (0, 6, 6, 8)
    assert upper.pages.tolist()[1] == lower.pages.tolist()[0]
    assert bench.pages.counts().tree == 2
    bench.cache.evict_leaf()
    assert bench.pages.counts().tree == 2  # the upper part still needs the page


def test_insert_tells_new_from_duplicate():
    bench = Bench()
    assert bench.insert([1, 2, 3]).duplicate == 0
    assert bench.insert([1, 2, 3, 4, 5]).duplicate == 3
    assert bench.insert([1, 2, 3, 4, 5]).duplicate == 5
    assert bench.insert([1, 2]).duplicate == 2
    assert bench.pages.counts().tree == 3  # the second brought a page of its own for [3, 5)


def test_a_checkpoint_is_found_where_it_was_put_and_not_before():
    bench = Bench()
    bench.insert(range(12))
    bench.insert(range(5), state=True)
    bench.insert(range(9), state=True)
    for limit, restored in [(4, 0), (5, 5), (8, 5), (9, 9), (12, 9)]:
        match = bench.cache.match(range(12), limit)
        assert (match.length, match.restored) == (limit, restored)
        assert match.reason == (None if restored == limit else "no_checkpoint")


def test_a_second_checkpoint_is_refused_and_stays_the_callers():
    bench = Bench()
    first = bench.insert([1, 2, 3], state=True)
    second = bench.insert([1, 2, 3], state=True)
    assert (first.refused, second.refused) == (None, "duplicate")
    assert bench.slots.counts().tree == 1


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_a_checkpoint_of_another_depth_is_never_taken(depth):
    bench = Bench()
    assert bench.insert([1, 2, 3], state=True, depth=depth).refused == "depth"
    assert bench.slots.counts().tree == 0
    assert bench.cache.match([1, 2, 3], 3).restored == 0


def test_a_slot_nobody_gave_away_is_not_taken():
    bench = Bench()
    table = bench.pages.allocate(1)
    assert table is not None
    with pytest.raises(RuntimeError, match="running does not hold slot 3"):
        bench.cache.insert([1], table, Checkpoint(3, 1))


def test_pages_must_cover_the_tokens():
    with pytest.raises(ValueError, match="1 pages of 4 cannot hold 5 tokens"):
        Bench().cache.insert(range(5), [0])


def test_a_state_that_lost_its_depth_is_noticed():
    bench = Bench()
    bench.insert([1, 2, 3], state=True)
    node = bench.node_at([1, 2, 3])
    assert node.checkpoint is not None
    node.checkpoint = replace(node.checkpoint, depth=2)
    with pytest.raises(RuntimeError, match="checkpoint of 2 tokens is at 3"):
        bench.cache.match([1, 2, 3], 3)
    with pytest.raises(RuntimeError, match="checkpoint of 2 tokens is at 3"):
        bench.cache.check_integrity()


def test_branch_depth_is_where_the_tree_goes_another_way():
    bench = Bench()
    bench.insert([1, 2, 3, 4, 5])
    branch = bench.cache.match([1, 2, 3, 9], 4).branch_depth
    assert branch == 3  # inside an edge
    assert bench.cache.match([1, 2, 3, 4, 5, 6], 6).branch_depth is None  # at its end
    assert bench.cache.match([7, 8], 2).branch_depth is None  # nothing shared
    bench.insert([1, 2, 3, 9])
    assert bench.cache.match([1, 2, 3, 8], 4).branch_depth == 3  # at a node with children
    bench.insert([1, 2, 3], state=True)
    assert bench.cache.match([1, 2, 3, 8], 4).branch_depth is None  # has a checkpoint already


def test_an_evicted_checkpoint_leaves_kv_and_the_reason():
    bench = Bench()
    bench.insert([1, 2], state=True)
    bench.insert([1, 2, 3, 4], state=True)
    assert bench.evict_checkpoint()  # the older one
    match = bench.cache.match([1, 2, 3], 3)
    assert (match.length, match.restored, match.reason) == (3, 0, "evicted")
    assert bench.cache.match([1, 2, 3, 4], 4).reason is None
    assert bench.slots.counts().tree == 1
    assert bench.evict_checkpoint()
    assert not bench.evict_checkpoint()
    assert bench.tiers.evicted["native_slots"] == 2
    assert bench.insert([1, 2], state=True).refused is None  # and it may come back
    assert bench.cache.match([1, 2], 2).restored == 2


def test_a_hit_refreshes_what_it_used_and_not_the_ancestors():
    bench = Bench()
    bench.insert([1], state=True)
    bench.insert([1, 2], state=True)
    bench.insert([7], state=True)
    lock = bench.cache.lock(bench.cache.match([1, 2], 2))
    bench.cache.touch(lock)
    bench.cache.unlock(lock)
    assert bench.evict_checkpoint()
    assert bench.cache.match([1], 1).reason == "evicted"
    assert bench.evict_checkpoint()
    assert bench.cache.match([7], 1).reason == "evicted"
    assert bench.cache.match([1, 2], 2).restored == 2


def test_kv_leaves_go_oldest_first_and_take_their_checkpoint():
    bench = Bench()
    bench.insert([1, 1, 1, 1, 1], state=True)
    bench.insert([2, 2, 2, 2, 2])
    lock = bench.cache.lock(bench.cache.match([1, 1, 1, 1, 1], 5))
    bench.cache.touch(lock)
    bench.cache.unlock(lock)
    assert bench.cache.evict_leaf() == 2
    assert bench.cache.match([2], 1).length == 0
    assert bench.cache.evict_leaf() == 2
    assert bench.slots.free == bench.slots.total
    assert bench.pages.free == bench.pages.total
    assert bench.cache.evict_leaf() is None
    assert (bench.cache.evicted_pages, bench.tiers.evicted["native_slots"]) == (4, 1)


def test_a_lock_pins_what_was_matched_and_nothing_deeper():
    bench = Bench()
    bench.insert(range(8), state=True)
    lock = bench.cache.lock(bench.cache.match(range(5), 5))
    bench.cache.check_integrity()
    assert bench.cache.evict_leaf() == 0  # [5, 8): its page is also that of [4, 5)
    assert bench.cache.evict_leaf() is None
    assert bench.cache.match(range(8), 8).length == 5
    bench.cache.unlock(lock)
    bench.cache.unlock(lock)
    bench.cache.check_integrity()
    assert bench.cache.evict_leaf() == 2


def test_a_locked_checkpoint_stays_while_others_go():
    bench = Bench()
    bench.insert([1], state=True)
    bench.insert([2], state=True)
    lock = bench.cache.lock(bench.cache.match([1], 1))
    assert bench.tiers.obtainable - bench.slots.free == 1
    assert bench.evict_checkpoint()
    assert not bench.evict_checkpoint()
    bench.cache.unlock_checkpoint(lock)
    assert bench.evict_checkpoint()
    assert bench.cache.match([1], 1).length == 1
    bench.cache.unlock(lock)


def test_a_locked_checkpoint_keeps_its_leaf_when_the_kv_lock_moves_away():
    bench = Bench()
    bench.insert([1], state=True)
    other = bench.insert([2])
    lock = bench.cache.lock(bench.cache.match([1], 1))
    bench.cache.move_lock(lock, other.node)
    assert bench.cache.evict_leaf() is None
    bench.cache.unlock_checkpoint(lock)
    bench.cache.check_integrity()
    assert bench.cache.evict_leaf() == 1
    assert bench.cache.match([2], 1).length == 1
    bench.cache.unlock(lock)


def test_a_match_holds_through_a_split_and_is_noticed_when_it_is_gone():
    bench = Bench()
    bench.insert(range(8))
    match = bench.cache.match(range(3), 3)
    bench.insert([0, 1, 2, 3, 4, 9])
    lock = bench.cache.lock(match)
    assert lock.node.end == 3
    bench.cache.unlock(lock)
    gone = bench.cache.match(range(8), 8)
    bench.cache.flush()
    with pytest.raises(RuntimeError, match="match of 8 tokens is no longer in the tree"):
        bench.cache.lock(gone)


def test_flush_keeps_only_what_is_in_use():
    bench = Bench()
    bench.insert([1, 2], state=True)
    bench.insert([1, 2, 3], state=True)
    bench.insert([7, 8], state=True)
    lock = bench.cache.lock(bench.cache.match([1, 2, 3], 3))
    bench.cache.flush()
    bench.cache.check_integrity()
    assert bench.slots.counts().tree == 1
    match = bench.cache.match([1, 2, 3], 3)
    assert (match.length, match.restored) == (3, 3)
    assert bench.cache.match([7, 8], 2).length == 0
    bench.cache.unlock(lock)
    bench.cache.flush()
    assert bench.pages.free == bench.pages.total
    assert bench.tiers.evicted["native_slots"] == 0


def test_edges_keep_no_python_object_per_token():
    bench = Bench(total_pages=1024)
    bench.insert(range(4000))
    node = bench.node_at(range(4000))
    assert node.tokens.dtype == node.pages.dtype == np.int32
    bench.insert(range(10), state=True)
    assert bench.node_at(range(10)).tokens.base is None  # does not keep the other 3990 alive


def test_the_heap_of_leaves_does_not_grow_with_hits():
    bench = Bench()
    bench.insert([1, 2])
    for _ in range(1000):
        lock = bench.cache.lock(bench.cache.match([1, 2], 2))
        bench.cache.touch(lock)
        bench.cache.unlock(lock)
    assert len(bench.cache._leaves._heap) <= 64 + 4


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [1], 0), ([1], [2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([5], [5], 1)],
)
def test_common_length(a, b, length):
    assert common_length(np.array(a, np.int32), np.array(b, np.int32)) == length


class NaiveCache:
    """The same cache as a dictionary of prefixes: slow, and plain to see that it is right."""

    def __init__(self):
        self.used: dict[tuple, int] = {}  # prefix at a node's end -> last use of its KV
        self.states: list[tuple] = []  # prefixes with a checkpoint, least recently used first
        self.lost: set[tuple] = set()  # prefixes whose checkpoint was evicted
        self.locks: Counter[tuple] = Counter()
        self.state_locks: Counter[tuple] = Counter()
        self.clock = 0

    def match(self, tokens, limit):
        tokens = tokens[:limit]
        length = max((common(tokens, end) for end in self.used), default=0)
        on_path = [s for s in self.states if tokens[: len(s)] == s and len(s) <= length]
        restored = max(map(len, on_path), default=0)
        lost = [s for s in self.lost if tokens[: len(s)] == s and restored < len(s) <= length]
        deeper = any(end[:length] == tokens[:length] and len(end) > length for end in self.used)
        short = restored < length
        reason = ("evicted" if lost else "no_checkpoint") if short else None
        return length, restored, length if deeper and short else None, reason

    def cut(self, prefix):
        """A node ends here from now on; the upper part is as old as the edge was."""
        if prefix and prefix not in self.used:
            below = [end for end in self.used if end[: len(prefix)] == prefix]
            self.used[prefix] = self.used[min(below, key=len)] if below else 0

    def use(self, prefix):
        self.clock += 1
        if prefix:
            self.used[prefix] = self.clock

    def insert(self, tokens, state):
        duplicate = self.match(tokens, len(tokens))[0]
        self.cut(tokens[:duplicate])
        self.cut(tokens)
        self.use(tokens)
        if state and tokens:
            self.use_state(tokens)

    def use_state(self, prefix):
        self.states = [s for s in self.states if s != prefix] + [prefix]
        self.lost.discard(prefix)

    def drop_state(self, prefix):
        self.states.remove(prefix)
        self.lost.add(prefix)

    def evict_state(self):
        victim = next((s for s in self.states if not self.state_locks[s]), None)
        if victim is not None:
            self.drop_state(victim)

    def evict_leaf(self):
        leaves = [
            end
            for end in self.used
            if not any(other != end and other[: len(end)] == end for other in self.used)
            and not self.locks[end]
            and not self.state_locks[end]
        ]
        if not leaves:
            return False
        victim = min(leaves, key=lambda end: self.used[end])
        del self.used[victim]
        self.states = [s for s in self.states if s != victim]
        self.lost.discard(victim)
        return True


def common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_agree_with_a_dictionary_of_prefixes(seed):
    rng = random.Random(seed)
    bench, naive = Bench(total_pages=40, total_slots=6), NaiveCache()
    cache = bench.cache
    locks: list[tuple[Lock, tuple, tuple]] = []

    def draw() -> tuple:
        return tuple(rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(0, 20)))

    for _ in range(1500):
        op, tokens = rng.random(), draw()
        if op < 0.35:
            while bench.pages.free < -(-len(tokens) // PAGE) and naive.evict_leaf():
                assert cache.evict_leaf() is not None
            state = rng.random() < 0.6
            if state and not bench.slots.free:
                naive.evict_state()
                bench.evict_checkpoint()
            if bench.pages.free >= -(-len(tokens) // PAGE) and (not state or bench.slots.free):
                naive.insert(tokens, state)
                bench.insert(tokens, state)
        elif op < 0.7:
            limit = rng.randint(0, 20)
            match = cache.match(tokens, limit)
            length, restored, branch, reason = naive.match(tokens, limit)
            assert (match.length, match.restored) == (length, restored)
            assert (match.branch_depth, match.reason) == (branch, reason)
            assert bench.spelled(match.pages, length) == list(tokens[:length])
            if len(locks) < 4:
                lock = cache.lock(match)
                cache.touch(lock)
                held = tokens[:length], tokens[:restored]
                locks.append((lock, *held))
                naive.cut(held[0])
                naive.use(held[0])
                naive.locks[held[0]] += 1
                if restored:
                    naive.use_state(held[1])
                    naive.state_locks[held[1]] += 1
        elif op < 0.9 and locks:
            lock, kv, state = locks.pop(rng.randrange(len(locks)))
            cache.unlock(lock)
            naive.locks[kv] -= 1
            naive.state_locks[state] -= bool(state)
        elif op < 0.95:
            assert (cache.evict_leaf() is not None) == naive.evict_leaf()
        else:
            naive.evict_state()
            bench.evict_checkpoint()
        cache.check_integrity()
        ends = {}
        for node in cache.walk():
            parent = ends[node.parent] if node.start else ()
            ends[node] = (*parent, *node.tokens.tolist())
        assert {end: node.used for node, end in ends.items()} == naive.used
        assert [ends[node] for node in bench.tiers.order] == naive.states

    for lock, _, _ in locks:
        cache.unlock(lock)
    cache.flush()
    cache.check_integrity()
    assert bench.pages.free == bench.pages.total
    assert bench.slots.free == bench.slots.total
