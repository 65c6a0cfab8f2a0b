"""What leaves the prefix tree, what is held in it, and what it costs."""

import numpy as np
import pytest

from jhybrid.cache.radix_node import common_length
from tests.cache.tree_bench import Bench


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
