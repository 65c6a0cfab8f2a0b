"""The two tiers against right values: what is demoted, what is evicted, and when (dasc, B.2)."""

import pytest

from jhybrid.cache.allocator import PoolCounts, SlotAllocator
from jhybrid.cache.radix_node import Checkpoint
from jhybrid.cache.tiers import CheckpointTiers
from tests.cache.simulated_engine import SimulatedEngine
from tests.cache.tiered_bench import TieredBench


def test_a_new_state_is_demoted_at_once_while_there_is_compressed_space():
    bench = TieredBench(native=4, compressed=2)
    bench.store(1, 2, 3)
    assert bench.states() == {1: "demoting", 2: "demoting", 3: "dense"}
    assert bench.native.counts() == PoolCounts(4, free=1, tree=3, running=0)
    assert bench.compressed.counts() == PoolCounts(2, free=0, tree=0, running=2)
    bench.settle()
    assert bench.states() == {1: "compressed", 2: "compressed", 3: "dense"}
    assert bench.native.counts() == PoolCounts(4, free=3, tree=1, running=0)
    assert bench.compressed.counts() == PoolCounts(2, free=0, tree=2, running=0)


def test_spill_passes_the_slot_on_without_a_copy():
    bench = TieredBench(native=4, compressed=1)
    bench.store(1)
    bench.settle()
    slot = bench.store(2)[0]
    node = bench.nodes[2]
    assert node.checkpoint == Checkpoint(slot, 1, "dense") and not bench.take()
    assert bench.native.owner(slot) == "tree"


def test_pressure_demotes_the_oldest_dense_state_into_free_space():
    bench = TieredBench(native=5, compressed=2)
    bench.store(1, 2, 3, 4)
    bench.settle()  # 1, 2 compressed; 3, 4 dense
    bench.drop(1)
    bench.use(3)  # 4 is the oldest dense one
    bench.tiers.reclaim(4)
    assert bench.states() == {2: "compressed", 4: "demoting", 3: "dense"}
    bench.settle()
    assert bench.states() == {2: "compressed", 4: "compressed", 3: "dense"}
    assert bench.evicted == (0, 0)


def test_both_full_and_the_oldest_dense_it_is_evicted():
    bench = TieredBench(native=3, compressed=1)
    bench.store(1)
    bench.settle()
    bench.store(2, 3)
    bench.use(1)  # compressed, and younger than 2 and 3
    assert bench.tiers.evicts_next
    bench.tiers.reclaim(2)
    assert bench.states() == {3: "dense", 1: "compressed"}
    assert bench.native.free == 2 and bench.evicted == (1, 0)


def test_both_full_and_the_oldest_compressed_it_makes_way_for_the_oldest_dense():
    bench = TieredBench(native=3, compressed=2)
    bench.store(1, 2)
    bench.settle()
    bench.store(3, 4)
    assert not bench.tiers.evicts_next
    bench.tiers.reclaim(2)
    assert bench.states() == {2: "compressed", 3: "demoting", 4: "dense"}
    assert bench.native.free == 1  # evicting 1 freed no native slot
    bench.settle()
    assert bench.native.free == 2 and bench.evicted == (0, 1)


def test_demotion_is_not_a_use():
    bench = TieredBench(native=4, compressed=3)
    bench.store(1, 2, 3)
    bench.settle(order=(2, 0, 1))
    assert list(bench.states()) == [1, 2, 3]


def test_without_a_dense_source_nothing_is_given_up():
    bench = TieredBench(native=2, compressed=2)
    bench.store(1, 2)
    bench.settle()
    held = bench.native.allocate(2)
    bench.tiers.reclaim(1)
    assert bench.states() == {1: "compressed", 2: "compressed"} and bench.evicted == (0, 0)
    assert held and bench.native.free == 0


def test_locked_states_are_neither_evicted_nor_demoted():
    bench = TieredBench(native=3, compressed=1)
    bench.store(1)
    bench.settle()
    bench.store(2, 3)
    for locked in (1, 2):
        bench.tiers.lock(bench.nodes[locked])
    bench.tiers.reclaim(2)  # the oldest unlocked is 3, and dense
    assert bench.states() == {1: "compressed", 2: "dense"}
    bench.tiers.reclaim(3)
    assert bench.states() == {1: "compressed", 2: "dense"}
    assert bench.tiers.obtainable == 2


def test_slots_on_their_way_count_as_coming():
    bench = TieredBench(native=3, compressed=2)
    bench.store(1, 2)  # both demoting
    bench.store(3)
    bench.tiers.reclaim(2)
    assert bench.states() == {1: "demoting", 2: "demoting", 3: "dense"}
    assert bench.tiers.obtainable == 3


def test_a_hit_while_packing_keeps_the_source():
    bench = TieredBench(native=2, compressed=1)
    bench.store(1)
    (demotion,) = bench.take()
    bench.tiers.lock(bench.nodes[1])
    assert not bench.tiers.commit(demotion)
    assert bench.states() == {1: "demoting"} and bench.native.owner(demotion.source) == "tree"
    bench.tiers.unlock(bench.nodes[1])
    assert bench.tiers.commit(demotion)
    with pytest.raises(RuntimeError, match="no demotion to slot 0"):
        bench.tiers.commit(demotion)
    with pytest.raises(RuntimeError, match="no demotion to slot 0"):
        bench.tiers.abort(demotion)


class Failing(SlotAllocator):
    """Raises at one call of one method."""

    def __init__(self, total: int):
        super().__init__(total)
        self.at: str | None = None

    def _fail(self, name: str) -> None:
        if self.at == name:
            self.at = None
            raise OSError("injected")

    def allocate(self, n):
        self._fail("allocate")
        return super().allocate(n)

    def donate(self, slot):
        self._fail("donate")
        super().donate(slot)

    def release(self, slot, owner):
        self._fail("release")
        super().release(slot, owner)


@pytest.mark.parametrize("step", ["reserve", "queued", "packing", "donate", "release"])
def test_an_abort_at_any_step_leaves_everything_as_it_was(step: str):
    native, compressed = Failing(3), Failing(2)
    tiers = CheckpointTiers(native, compressed)
    bench = TieredBench.of(tiers)
    bench.store(1, 4)
    bench.settle()
    bench.store(2, 3)
    bench.drop(4)  # 1 is compressed, 2 and 3 are dense, and there is room for one of them
    before = bench.states(), bench.checkpoints(), native.counts(), compressed.counts()

    def now():
        return bench.states(), bench.checkpoints(), native.counts(), compressed.counts()

    if step == "reserve":
        compressed.at = "allocate"
        with pytest.raises(OSError):
            tiers.reclaim(2)
        assert now() == before and tiers.aborted == 0
    else:
        tiers.reclaim(2)
        demotion = next(iter(tiers._demotions.values()))
        assert bench.states()[2] == "demoting" and now() != before
        if step != "queued":
            assert bench.take() == [demotion]
        if step in ("donate", "release"):
            (compressed if step == "donate" else native).at = step
            with pytest.raises(OSError):
                tiers.commit(demotion)
        tiers.abort(demotion)
        assert now() == before and tiers.aborted == 1 and not bench.take()
    bench.check()
    tiers.reclaim(2)  # and it can be tried again
    bench.settle()
    assert list(bench.states().items()) == [(1, "compressed"), (2, "compressed"), (3, "dense")]


def test_a_state_of_another_depth_is_refused():
    tiers = CheckpointTiers(SlotAllocator(1), SlotAllocator(1))
    slots = tiers.native.allocate(1)
    node = TieredBench.node(1)
    assert slots and tiers.attach(node, Checkpoint(slots[0], 2)) == "depth"
    assert node.checkpoint is None and tiers.native.owner(slots[0]) == "running"


# Through the manager


def test_a_compressed_hit_says_so_and_frees_its_source_when_read():
    engine = SimulatedEngine(total_slots=3, checkpoint_interval=100, compressed_slots=4)
    engine.run(range(8))
    hit = engine.admit([*range(8), 9], tokens_total=9)
    assert hit is not None and hit.lease.source is not None
    assert hit.lease.source.representation == "compressed" and hit.lease.restored == 8
    assert not hit.lease.exact  # packing loses something
    assert engine.step(hit, 9)
    engine.finish(hit)
    engine.check_all()


def test_a_request_waits_for_a_slot_that_is_on_its_way():
    engine = SimulatedEngine(total_slots=1, checkpoint_interval=100, compressed_slots=1)
    request = engine.admit(range(8), tokens_total=8)
    assert request is not None and engine.step(request, 8)
    engine.finish(request)
    assert engine.manager.demoting == 1
    assert engine.admit([7, 7], tokens_total=2) is None  # not evicted: it is being demoted
    assert engine.admit([*range(8), 9], tokens_total=9) is None
    engine.pack()
    engine.settle()
    again = engine.admit([*range(8), 9], tokens_total=9)
    assert again is not None and again.lease.restored == 8
    assert engine.manager.stats().demotions == {"committed": 1, "aborted": 0}
    assert not any(engine.manager.stats().evictions.values())


def test_the_watermark_is_kept_free():
    engine = SimulatedEngine(
        total_slots=6, checkpoint_interval=100, compressed_slots=2, watermark=3
    )
    for first in range(1, 7):
        engine.run([first] * 4)
    counts = engine.manager.stats().pools
    assert counts["native_slots"] == PoolCounts(6, free=3, tree=3, running=0)
    assert counts["compressed_slots"] == PoolCounts(2, free=0, tree=2, running=0)
    engine.check_all()
    with pytest.raises(ValueError, match="watermark must be from 0 to 5, got 6"):
        SimulatedEngine(total_slots=6, watermark=6)


def test_strict_requests_never_see_what_an_approximation_led_to():
    engine = SimulatedEngine(total_slots=4, checkpoint_interval=100, compressed_slots=8)
    engine.run(range(8))
    loose = engine.admit([*range(8), 20, 21, 22], tokens_total=11)
    assert loose is not None and loose.lease.restored == 8 and not loose.lease.exact
    assert engine.step(loose, 11)
    engine.finish(loose)
    manager = engine.manager
    seen = manager.admit([*range(8), 20, 21, 22, 23], 11)
    assert seen is not None and seen.matched == 11 and not seen.exact
    manager.finish(seen, [], donate=False)
    strict = manager.admit([*range(8), 20, 21, 22, 23], 11, strict=True, tokens_total=12)
    assert strict is not None
    assert (strict.matched, strict.restored, strict.reason) == (8, 0, "not_exact")
    assert strict.exact and strict.source is None
    strict.set_state_depth(12)
    commit = manager.finish(strict, [*range(8), 20, 21, 22, 23])  # would go below it: not kept
    assert (commit.new, commit.refused) == (0, "depth")
    manager.check_integrity()


def test_lossless_packing_is_exact():
    engine = SimulatedEngine(checkpoint_interval=100, compressed_slots=8, lossless=True)
    engine.run(range(8))
    strict = engine.manager.admit(range(9), 8, strict=True)
    assert strict is not None and strict.restored == 8 and strict.exact
    assert strict.source is not None and strict.source.representation == "compressed"


def test_four_slots_and_two_compressed_serve_thirty_two_requests():
    engine = SimulatedEngine(
        total_pages=64, total_slots=4, reserve=1, compressed_slots=2, watermark=1
    )
    waiting = [[first % 8] * 12 + [first] for first in range(32)]
    finished = steps = 0
    while finished < 32:
        steps += 1
        assert steps < 1000  # never stuck
        while waiting and engine.admit(waiting[0], tokens_total=len(waiting[0])):
            waiting.pop(0)
        finished += engine.advance(5)
        engine.pack(2)
        engine.settle()
        engine.check_all()
    assert engine.manager.stats().pools["native_slots"].running == 0
