"""Random requests on small pools against a dictionary of what must be cached.

The simulated engine reads every page and slot that the cache names, after every operation. The
dictionary says what the tree must hold: all that was committed, until something is evicted.
"""

import random
from bisect import bisect_left

import pytest

from tests.cache.simulated_engine import Running, SimulatedEngine

Prefixes = dict[tuple[int, ...], bool]  # what is cached -> has a checkpoint


def common(a, b) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def covered(prefix: tuple[int, ...], ordered: list[tuple[int, ...]]) -> bool:
    """Whether one of the sorted tuples starts with it: if any does, the next in order does."""
    after = ordered[bisect_left(ordered, prefix) :][:1]
    return any(other[: len(prefix)] == prefix for other in after)


class Workload:
    """Random operations; `expected` is the dictionary, set anew from the tree after evictions."""

    def __init__(self, seed: int, **sizes: int):
        self.rng = random.Random(seed)
        self.engine = SimulatedEngine(**sizes)
        self.bases = [self.rng.choices((0, 0, 0, 1), k=25) for _ in range(3)]
        self.manager = self.engine.manager
        self.expected: Prefixes = {}
        self.evicted = False
        self.refused = self.preempted = self.hits = 0
        self.resumable: list[list[int]] = []  # tokens of preempted requests, to come back
        self._watch_evictions()

    def operate(self) -> None:
        self.evicted = False
        op = self.rng.random()
        running = self.engine.running
        if op < 0.25 or not running:
            self.submit()
        elif op < 0.85:
            self.step(self.rng.choice(running))
        elif op < 0.93:
            self.end(self.rng.choice(running))
        elif op < 0.96:
            self.end(self.rng.choice(running), donate=False)
        elif op < 0.99:
            self.stray_checkpoints(self.rng.choice(running))
        else:
            self.evicted = True  # as far as the dictionary is concerned
            self.manager.flush()
        if self.rng.random() < 0.5:
            self.engine.pack(self.rng.randint(0, 2))
        if self.rng.random() < 0.4:
            self.engine.settle()
        elif self.engine.packing and self.rng.random() < 0.1:
            self.manager.abort_demotion(self.engine.packing.pop())
        self.compare()

    def submit(self) -> None:
        rng, manager = self.rng, self.manager
        if self.resumable and rng.random() < 0.5:
            tokens = self.resumable.pop()
        else:
            tail: list[int] = rng.choices((0, 1), k=rng.randint(1, 6))
            tokens = [*self.bases[rng.randrange(3)][: rng.randint(0, 25)], *tail]
        limit = len(tokens) - 1 if rng.random() < 0.8 else rng.randint(0, len(tokens))
        total = rng.choice((0, rng.randint(0, len(tokens)), len(tokens)))
        reuse = rng.random() < 0.9
        before = manager.stats()
        request = self.engine.admit(tokens, limit, reuse, total)
        if request is None:
            self.refused += 1
            # That it holds no page either is what the recount of references in `compare` says.
            assert (
                manager.stats().pools["native_slots"].running
                == before.pools["native_slots"].running
            )
            alone = not self.engine.running and not manager.demoting
            assert not alone or -(-total // manager.page_size) > before.pools["kv_pages"].total
            return
        lease = request.lease
        if lease.reason == "no_room":
            assert len(self.engine.running) == 1 and lease.matched == 0
        elif reuse:
            assert lease.matched == self.longest(tokens, limit)
            assert lease.restored == self.deepest_state(tokens, lease.matched)
            self.hits += lease.restored > 0
            if lease.matched:
                self.commit(tokens[: lease.matched])
        else:
            assert (lease.matched, lease.reason) == (0, "disabled")

    def step(self, request: Running) -> None:
        rng, lease = self.rng, request.lease
        if request.done >= len(request.tokens):
            request.tokens.append(rng.choice((0, 1)))
        end = rng.randint(request.done + 1, min(len(request.tokens), request.done + 12))
        commit = rng.random() < 0.5
        held = self.manager.stats().pools["kv_pages"]
        alone = len(self.engine.running) == 1 and request.started and not self.manager.demoting
        if not self.engine.step(request, end, commit):
            after = self.manager.stats().pools["kv_pages"]
            assert after.running >= held.running and len(lease.page_table) <= after.total
            assert not alone or -(-end // self.manager.page_size) > after.total
            self.preempted += 1
            victim = rng.choice(self.engine.running)
            if -(-len(victim.tokens) // self.manager.page_size) <= after.total:
                self.resumable.append(list(victim.tokens))
            self.end(victim)
            return
        for tokens in self.engine.stored:
            self.commit(tokens, state=True)
        if commit:
            self.commit(request.tokens[:end])

    def stray_checkpoints(self, request: Running) -> None:
        """Slots of a wrong depth or given back must leave no trace."""
        slots = self.manager.slots.reserve(self.rng.randint(1, 3))
        for slot in slots:
            self.engine.slots[slot] = (-7,)
            depth = request.done if request.started else 0
            if self.rng.random() < 0.5:
                wrong = depth + self.rng.choice((-1, 1))
                commit = self.manager.commit_prefix(
                    request.lease, request.tokens[:depth], (slot, wrong)
                )
                assert commit.refused == "depth"
                self.commit(request.tokens[:depth])
            else:
                self.manager.slots.give_up([slot])

    def end(self, request: Running, donate: bool = True) -> None:
        written = request.tokens[: request.done] if request.started else []
        self.engine.finish(request, donate)
        if donate and written:
            self.commit(written, state=True)

    # The dictionary

    def commit(self, tokens: list[int], state: bool = False) -> None:
        if tokens:
            prefix = tuple(tokens)
            self.expected[prefix] = state or self.expected.get(prefix, False)

    def longest(self, tokens: list[int], limit: int) -> int:
        return max((common(tokens[:limit], prefix) for prefix in self.expected), default=0)

    def deepest_state(self, tokens: list[int], matched: int) -> int:
        depths = range(matched, 0, -1)
        return next((n for n in depths if self.expected.get(tuple(tokens[:n]))), 0)

    def compare(self) -> None:
        """The tree holds nothing that was not committed, and all of it unless it evicted."""
        actual = self.engine.check_all()
        expected, cached = sorted(self.expected), sorted(actual)
        states = {prefix for prefix, state in actual.items() if state}
        assert states <= {prefix for prefix, state in self.expected.items() if state}
        for prefix in actual:
            assert covered(prefix, expected)
        for request in self.engine.running:
            pinned = request.lease.lock.node.end
            assert not pinned or tuple(request.tokens[:pinned]) in actual
        if not self.evicted:
            for prefix, state in self.expected.items():
                assert covered(prefix, cached)
                assert not state or actual[prefix]
        self.expected = actual

    def _watch_evictions(self) -> None:
        def watched(evict):
            def call(*args):
                self.evicted = True
                return evict(*args)

            return call

        pools = self.manager.pools
        for owner, name in ((pools.tree, "evict_leaf"), (pools.tiers, "evict")):
            setattr(owner, name, watched(getattr(owner, name)))


SIZES = [
    dict(total_pages=12, page_size=4, total_slots=4, checkpoint_interval=4, reserve=1),
    dict(total_pages=9, page_size=5, total_slots=7, checkpoint_interval=6, reserve=0),
    dict(total_pages=60, page_size=1, total_slots=3, checkpoint_interval=3, reserve=2),
    dict(total_pages=4, page_size=16, total_slots=2, checkpoint_interval=8, reserve=0),
    dict(total_pages=32, page_size=4, total_slots=16, checkpoint_interval=4, reserve=2),
]
TIERS = [
    dict(total_pages=30, page_size=4, total_slots=4, checkpoint_interval=4, compressed_slots=3),
    dict(total_pages=60, page_size=1, total_slots=2, checkpoint_interval=3, compressed_slots=1),
    dict(total_pages=40, page_size=3, total_slots=7, checkpoint_interval=5)
    | dict(compressed_slots=5, watermark=3, reserve=1),
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(map(str, s.values())))
def test_random_requests_agree_with_a_dictionary(sizes):
    load = Workload(seed=sizes["total_pages"], **sizes)
    for _ in range(2100):
        load.operate()
    stats = load.manager.stats()
    assert min(stats.evictions[pool] for pool in ("kv_pages", "native_slots")) > 50
    assert load.hits > 5
    assert load.refused > 50 and (load.preempted > 30 or sizes["total_slots"] <= 3)
    finish(load)


@pytest.mark.parametrize("sizes", TIERS, ids=lambda s: "-".join(map(str, s.values())))
def test_random_requests_on_two_tiers_agree_with_a_dictionary(sizes):
    load = Workload(seed=sizes["total_pages"], **sizes)
    for _ in range(2100):
        load.operate()
    stats = load.manager.stats()
    assert min(stats.evictions[pool] for pool in ("kv_pages", "compressed_slots")) > 50
    assert load.hits > 5 and load.refused > 50
    assert min(stats.demotions.values()) > 10
    finish(load)


def finish(load: Workload) -> None:
    """Everything ends, and every page and slot is the tree's or free."""
    sizes = load.manager.stats().pools
    for request in list(load.engine.running):
        load.end(request)
    while load.manager.demoting:
        load.engine.pack()
        load.engine.settle()
    load.engine.check_all()
    pools = load.manager.stats().pools
    assert [pool.running for pool in pools.values()] == [0] * len(pools)
    load.manager.flush()
    pools = load.manager.stats().pools
    assert [pool.free for pool in pools.values()] == [pool.total for pool in sizes.values()]
