"""The prefix tree against right values: matches, branches, checkpoints."""

from dataclasses import replace

import pytest

from jhybrid.cache.radix_node import Checkpoint
from tests.cache.tree_bench import PAGE, Bench


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
