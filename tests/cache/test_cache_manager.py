"""Admission, growth, checkpoints and donation with right values, and faults seen elsewhere."""

import numpy as np
import pytest

from jhybrid.cache.allocator import PoolCounts
from jhybrid.cache.cache_manager import CacheManager
from tests.cache.simulated_engine import SimulatedEngine


def test_a_cold_admission_holds_a_slot_and_the_pages_asked_for():
    manager = CacheManager(8, 4, 2, 8)
    lease = manager.admit(range(10), 9, tokens_total=10)
    assert lease is not None
    assert (lease.matched, lease.restored, lease.source, lease.reason) == (0, 0, None, None)
    assert len(lease.page_table) == 3 and lease.page_copies == [] and lease.write_from == 0
    stats = manager.stats()
    assert stats.pools["kv_pages"] == PoolCounts(8, free=5, tree=0, running=3)
    assert stats.pools["native_slots"] == PoolCounts(2, free=1, tree=0, running=1)


def test_a_hit_shares_full_pages_and_copies_the_one_it_ends_in():
    engine = SimulatedEngine()
    first = engine.admit(range(11))
    assert first is not None and engine.step(first, 11)
    owned = list(first.lease.page_table)
    engine.finish(first)
    hit = engine.admit(range(11), tokens_total=11)
    assert hit is not None
    lease = hit.lease
    assert (lease.matched, lease.restored, lease.write_from) == (10, 10, 10)
    assert lease.page_table[:2].tolist() == owned[:2] and lease.page_table[2] != owned[2]
    assert lease.page_copies == [(owned[2], lease.page_table[2])]
    assert lease.source is not None and lease.source.slot != lease.slot
    assert engine.step(hit, 11)
    assert lease.page_copies == []


def test_a_match_at_a_page_border_copies_nothing():
    engine = SimulatedEngine()
    engine.run(range(8))
    hit = engine.admit([*range(8), 99], tokens_total=9)
    assert hit is not None
    assert (hit.lease.matched, hit.lease.restored) == (8, 8)
    assert hit.lease.page_copies == [] and len(hit.lease.page_table) == 3


def test_admission_takes_all_or_nothing():
    manager = CacheManager(4, 4, 1, 8)
    before = manager.stats()
    assert manager.admit(range(20), 19, tokens_total=20) is None  # 5 pages of 4
    assert manager.stats() == before
    lease = manager.admit(range(4), 3, tokens_total=4)
    assert lease is not None
    held = manager.stats()
    assert manager.admit(range(4), 3) is None  # no slot
    assert manager.stats() == held
    manager.finish(lease, [], donate=False)
    assert manager.stats() == before
    manager.check_integrity()


def test_grow_takes_all_or_nothing():
    manager = CacheManager(3, 4, 2, 8)
    lease = manager.admit(range(4), 3, tokens_total=4)
    other = manager.admit(range(4), 3, tokens_total=4)
    assert lease is not None and other is not None
    assert not manager.grow(lease, 12)
    assert len(lease.page_table) == 1
    assert manager.grow(lease, 8) and manager.grow(lease, 5)
    assert len(lease.page_table) == 2
    manager.check_integrity()


def test_what_cannot_help_is_not_evicted():
    engine = SimulatedEngine(total_pages=6)
    engine.run(range(8))
    busy = engine.admit([90, 91], tokens_total=8)
    assert busy is not None
    assert engine.admit([80, 81], tokens_total=20) is None
    assert not engine.manager.grow(busy.lease, 100)
    assert not any(engine.manager.stats().evictions.values())


def test_admission_makes_room_but_not_of_what_it_matched():
    engine = SimulatedEngine(total_pages=5, total_slots=4, checkpoint_interval=100)
    engine.run([1] * 8)
    engine.run([2] * 8)
    hit = engine.admit([1] * 8 + [3] * 8, tokens_total=16)
    assert hit is not None
    assert (hit.lease.matched, hit.lease.restored) == (8, 8)
    engine.check_all()
    assert engine.manager.stats().evictions["kv_pages"] == 2
    engine.finish(hit, donate=False)
    assert engine.manager.admit([2] * 8, 7, tokens_total=8).matched == 0  # pyright: ignore


def test_a_hit_is_a_use_and_what_nobody_hits_goes_first():
    engine = SimulatedEngine(total_pages=6, total_slots=8, checkpoint_interval=100)
    engine.run([1] * 8)
    engine.run([2] * 8)
    hit = engine.admit([1] * 9)
    assert hit is not None and hit.lease.restored == 8
    engine.finish(hit, donate=False)
    assert engine.admit([3] * 16, tokens_total=16) is not None
    engine.check_all()
    assert engine.manager.admit([2] * 9, 8).matched == 0  # pyright: ignore
    assert engine.manager.admit([1] * 9, 8).restored == 8  # pyright: ignore


def test_alone_a_request_does_without_a_hit_that_takes_its_room():
    engine = SimulatedEngine(total_slots=1)
    engine.run(range(8))
    assert engine.manager.stats().pools["native_slots"].tree == 1
    lease = engine.run([*range(8), 9])
    assert (lease.matched, lease.reason) == (0, "no_room")


def test_alone_a_request_grows_over_its_own_cached_prefix():
    engine = SimulatedEngine(total_pages=4)
    engine.run(range(6))
    request = engine.admit([*range(6), 70, 71, 72, 73], tokens_total=7)
    assert request is not None and request.lease.matched == 6
    assert engine.step(request, 8)
    request.tokens += [74] * 6
    assert engine.step(request, 16)  # every page: the tree's copy of [4, 6) had to go
    engine.check_all()
    engine.finish(request)
    assert engine.manager.stats().pools["kv_pages"] == PoolCounts(4, free=0, tree=4, running=0)


def test_reserved_slots_leave_the_floor_and_evict_the_oldest():
    engine = SimulatedEngine(total_slots=4, checkpoint_interval=100)
    for first in (1, 2, 3):
        engine.run([first] * 2)  # a checkpoint at 1 and at 2: six, of which four stay
    manager = engine.manager
    assert manager.stats().pools["native_slots"] == PoolCounts(4, free=0, tree=4, running=0)
    slots = manager.slots.reserve(9, floor=1)
    assert len(slots) == 3
    assert manager.slots.reserve(1, floor=1) == []
    assert manager.admit([5], 0) is not None
    manager.check_integrity()
    manager.slots.give_up(slots)
    with pytest.raises(ValueError, match="not reserved"):
        manager.slots.give_up(slots[:1])
    manager.check_integrity()


def test_checkpoint_depths_are_grid_branch_and_one_short_of_the_prompt():
    engine = SimulatedEngine(checkpoint_interval=8)
    lease = engine.manager.admit(range(21), 20)
    assert lease is not None
    depths = engine.manager.checkpoint_depths
    assert depths(lease, 0, 21, 21) == [8, 16, 20]
    assert depths(lease, 8, 16, 21) == [16]
    assert depths(lease, 16, 19, 21) == []
    assert depths(lease, 0, 1, 1) == []
    lease.branch_depth = 11
    assert depths(lease, 8, 21, 21) == [11, 16, 20]


def test_commit_shares_while_the_request_runs_and_refuses_wrong_states():
    engine = SimulatedEngine(total_slots=8)
    manager = engine.manager
    request = engine.admit(range(10), tokens_total=20)
    assert request is not None and engine.step(request, 10, commit=False)
    right, wrong, twice = manager.slots.reserve(3)
    engine.slots[right] = tuple(range(9))
    assert manager.commit_prefix(request.lease, range(10), (wrong, 8)).refused == "depth"
    commit = manager.commit_prefix(request.lease, range(10), (twice, 10))
    assert (commit.new, commit.duplicate, commit.refused) == (0, 10, None)
    engine.slots[twice] = tuple(range(10))
    # 9 = prompt_len - 1 was stored by the step
    assert manager.commit_prefix(request.lease, range(9), (right, 9)).refused == "duplicate"
    engine.check_all()
    with pytest.raises(ValueError, match="slot 99 is not reserved"):
        manager.commit_prefix(request.lease, range(10), (99, 10))
    with pytest.raises(ValueError, match="5 pages hold 20 tokens, not 21"):
        manager.commit_prefix(request.lease, range(21))
    manager.check_integrity()


def test_twins_that_ran_side_by_side_end_up_on_the_same_pages():
    engine = SimulatedEngine()
    twins = [engine.admit(range(10), tokens_total=10) for _ in range(2)]
    for twin in twins:
        assert twin is not None and engine.step(twin, 10)
        engine.check_all()
    one, two = (twin.lease.page_table.tolist() for twin in twins if twin)
    assert one[:2] == two[:2] and one[2] != two[2]
    assert engine.manager.stats().pools["kv_pages"].running == 1  # the second's page for [8, ...)


def test_finish_donates_the_slot_only_with_the_depth_of_its_state():
    for state_depth, given in [(None, 0), (5, 0), (6, 1), (7, 0)]:
        manager = CacheManager(8, 4, 2, 100)
        lease = manager.admit(range(8), 7, tokens_total=8)
        assert lease is not None
        if state_depth is not None:
            lease.set_state_depth(state_depth)
        slot = lease.slot
        commit = manager.finish(lease, range(6))
        assert commit.new == 6 and (commit.refused is None) == bool(given)
        assert manager.stats().pools["native_slots"].tree == given
        assert manager.stats().pools["kv_pages"] == PoolCounts(8, free=6, tree=2, running=0)
        again = manager.admit(range(8), 7)
        assert again is not None
        source = again.source.slot if again.source else None
        assert (again.restored, source) == ((6, slot) if given else (0, None))
        manager.check_integrity()


def test_finish_without_donation_leaves_nothing():
    engine = SimulatedEngine()
    request = engine.admit(range(8), tokens_total=8)
    assert request is not None and engine.step(request, 8, commit=False)
    engine.manager.flush()
    before = engine.manager.stats().pools["kv_pages"].tree
    engine.finish(request, donate=False)
    assert engine.manager.stats().pools["kv_pages"].tree <= before
    with pytest.raises(RuntimeError, match="finished"):
        engine.manager.finish(request.lease, [])
    with pytest.raises(RuntimeError, match="finished"):
        engine.manager.grow(request.lease, 1)
    engine.manager.check_integrity()


def test_a_state_in_use_is_not_evicted_until_it_is_read():
    engine = SimulatedEngine(total_slots=3, checkpoint_interval=100)
    engine.run([1, 1])
    hit = engine.admit([1, 1, 2], tokens_total=3)
    assert hit is not None and hit.lease.restored == 2
    assert len(engine.manager.slots.reserve(3)) == 1
    engine.check_all()
    engine.manager.release_source(hit.lease)
    engine.manager.release_source(hit.lease)
    assert len(engine.manager.slots.reserve(3)) == 1
    engine.finish(hit)
    with pytest.raises(RuntimeError, match="reserved for nobody"):
        engine.manager.check_integrity()
    engine.manager.slots.give_up(engine.manager.slots.reserved)
    engine.manager.check_integrity()


def test_reuse_off_matches_nothing_and_says_so():
    engine = SimulatedEngine()
    engine.run(range(8))
    off = engine.admit(range(8), reuse=False)
    assert off is not None
    assert (off.lease.matched, off.lease.reason) == (0, "disabled")


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="checkpoint_interval must be at least 1, got 0"):
        CacheManager(1, 1, 1, 0)
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        CacheManager(1, 0, 1, 1)


def test_a_wrong_recount_raises_with_the_numbers():
    manager = CacheManager(4, 4, 2, 8)
    lease = manager.admit(range(4), 3, tokens_total=4)
    assert lease is not None
    lease.page_table = np.append(lease.page_table, np.int32(3))
    with pytest.raises(RuntimeError, match="page 3 has 0, counted 1"):
        manager.check_integrity()
