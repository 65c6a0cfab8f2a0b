"""Pages and slots: all or nothing, and free + tree + running = total."""

import numpy as np
import pytest

from jhybrid.cache.allocator import PageAllocator, PoolCounts, SlotAllocator


def test_pages_are_taken_all_or_nothing():
    pages = PageAllocator(4)
    assert taken(pages, 3) == [0, 1, 2]
    assert pages.allocate(2) is None
    assert pages.counts() == PoolCounts(total=4, free=1, tree=0, running=3)
    assert taken(pages, 1) == [3]
    assert taken(pages, 0) == []


def test_a_page_counts_as_the_trees_while_the_tree_holds_it_at_all():
    pages = PageAllocator(3)
    held = pages.allocate(2)
    assert held is not None
    pages.retain(held[:1], "tree")
    assert pages.counts() == PoolCounts(3, free=1, tree=1, running=1)
    assert pages.reclaimable() == 0
    assert pages.release(held, "running") == 1
    assert pages.counts() == PoolCounts(3, free=2, tree=1, running=0)
    assert pages.reclaimable() == 1
    assert pages.release(held[:1], "tree") == 1
    assert pages.counts() == PoolCounts(3, free=3, tree=0, running=0)


def test_releasing_what_is_not_held_raises_and_changes_nothing():
    pages = PageAllocator(3)
    held = pages.allocate(1)
    assert held is not None
    with pytest.raises(RuntimeError, match="tree does not hold"):
        pages.release(held, "tree")
    with pytest.raises(RuntimeError, match="running does not hold"):
        pages.release([0, 1], "running")
    with pytest.raises(RuntimeError, match="running does not hold"):
        pages.release([0, 0], "running")
    with pytest.raises(RuntimeError, match="free pages"):
        pages.retain([0, 2], "tree")
    with pytest.raises(ValueError, match="0..2"):
        pages.release([-1], "running")
    assert pages.counts() == PoolCounts(3, free=2, tree=0, running=1)
    pages.check_integrity("running", np.array([1, 0, 0]))
    pages.check_integrity("tree", np.zeros(3, np.int64))


def test_a_page_recount_that_differs_names_the_numbers():
    pages = PageAllocator(2)
    pages.allocate(1)
    with pytest.raises(RuntimeError, match="page 0 has 1, counted 2"):
        pages.check_integrity("running", np.array([2, 0]))


def test_slots_change_owner_and_never_have_two():
    slots = SlotAllocator(3)
    assert slots.allocate(4) is None
    assert slots.allocate(2) == [0, 1]
    slots.donate(1)
    assert slots.counts() == PoolCounts(3, free=1, tree=1, running=1)
    with pytest.raises(RuntimeError, match="running does not hold slot 1: tree"):
        slots.donate(1)
    with pytest.raises(RuntimeError, match="running does not hold slot 1: tree"):
        slots.release(1, "running")
    with pytest.raises(RuntimeError, match="tree does not hold slot 2: free"):
        slots.release(2, "tree")
    slots.check_integrity("tree", {1})
    slots.check_integrity("running", {0})
    with pytest.raises(RuntimeError, match=r"slots of tree: \[1\], counted \[2\]"):
        slots.check_integrity("tree", {2})
    slots.release(1, "tree")
    slots.release(0, "running")
    assert slots.counts() == PoolCounts(3, free=3, tree=0, running=0)


@pytest.mark.parametrize("pool", [PageAllocator, SlotAllocator])
def test_impossible_sizes_are_refused(pool):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        pool(0)
    with pytest.raises(ValueError, match="not be negative, got -1"):
        pool(1).allocate(-1)


def taken(pages: PageAllocator, count: int) -> list[int]:
    found = pages.allocate(count)
    assert found is not None
    return found.tolist()
