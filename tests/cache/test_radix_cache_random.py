"""The prefix tree against a dictionary of prefixes on random tokens."""

import random
from collections import Counter

import pytest

from jhybrid.cache.radix_node import Lock
from tests.cache.tree_bench import PAGE, Bench


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
