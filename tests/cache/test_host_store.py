"""What evicted pages leave in host memory, against a dictionary of prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jhybrid.cache.host_store import CHUNK_ROWS, LEAST_CHUNKS, HostStore, input_pieces

PAGE, PAGE_BYTES, INPUT_BYTES, STATE_BYTES = 4, 100, 10, 900


def store(chunks: int = 1000) -> HostStore:
    capacity = chunks * CHUNK_ROWS[0] * (PAGE_BYTES + INPUT_BYTES)
    return HostStore(capacity, PAGE, PAGE_BYTES, INPUT_BYTES, STATE_BYTES)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def put(host: HostStore, tokens: np.ndarray, start: int = 0, exact: bool = True) -> None:
    for run in host.missing(tokens, start // PAGE, exact):
        host.add(tokens, run, np.zeros(len(run), bool), exact)
    host.check_integrity()


def test_a_continuation_is_found_from_inside_a_page_to_any_token() -> None:
    host = store()
    tokens = np.arange(30, dtype=np.int32)
    put(host, tokens)
    for start in (0, 3, 4, 17):
        for end in (18, 20, 30):
            longer = np.append(tokens[:end], ids(99, 98)).astype(np.int32)
            match = host.match(longer, start, strict=True)
            assert match.length == end
            assert [row for _, rows in match.runs for row in rows] == list(
                range(start // PAGE, -(-end // PAGE))
            )
    assert host.match(tokens[:17], 17, strict=True).runs == ()


def test_the_same_page_is_kept_once_and_other_prefixes_do_not_meet() -> None:
    host = store()
    put(host, np.arange(16, dtype=np.int32))
    used = host.used
    put(host, np.arange(16, dtype=np.int32))
    assert host.used == used
    other = np.append(ids(7), np.arange(1, 16)).astype(np.int32)
    assert host.match(other, 4, strict=True).length == 4  # same tokens behind another prefix


def test_strict_takes_only_what_is_exact() -> None:
    host = store()
    tokens = np.arange(16, dtype=np.int32)
    put(host, tokens[:8])
    put(host, tokens, exact=False)
    assert host.match(tokens, 0, strict=True).length == 8
    loose = host.match(tokens, 0, strict=False)
    assert loose.length == 16 and not loose.exact


def test_the_least_recently_used_chunk_goes_first() -> None:
    host = store(chunks=3)
    names = [np.full(8, n, np.int32) for n in range(4)]
    for tokens in names[:3]:
        put(host, tokens)
    host.match(names[0], 0, strict=True)
    put(host, names[3])
    assert [host.match(t, 0, strict=True).length for t in names] == [8, 0, 8, 8]
    assert host.evicted == 1
    host.flush()
    assert host.used == 0
    host.check_integrity()


def test_a_capacity_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        HostStore(0, PAGE, PAGE_BYTES, INPUT_BYTES, STATE_BYTES)
    host = HostStore(5, PAGE, PAGE_BYTES, INPUT_BYTES, STATE_BYTES)
    assert not host.fits(range(1))


def test_random_prefixes_against_a_set_of_them() -> None:
    rng = np.random.default_rng(0)
    host, known = store(), set()
    for _ in range(300):
        tokens = rng.integers(0, 2, int(rng.integers(1, 40))).astype(np.int32)
        if rng.random() < 0.5:
            put(host, tokens)
            known |= {tuple(tokens[:n].tolist()) for n in range(1, len(tokens) + 1)}
        else:
            expected = max(
                (n for n in range(1, len(tokens) + 1) if tuple(tokens[:n].tolist()) in known),
                default=0,
            )
            match = host.match(tokens, 0, strict=True)
            assert match.length == expected
            spelled = [c.tokens[r.start * PAGE : r.stop * PAGE] for c, r in match.runs]
            if spelled:
                found = np.concatenate(spelled)[:expected]
                np.testing.assert_array_equal(found, tokens[:expected])


def test_the_deepest_state_on_the_way_is_found_and_counts_bytes() -> None:
    host = store(chunks=4)
    tokens = np.arange(30, dtype=np.int32)
    assert host.add_state(tokens[:7]) is None  # nothing holds its tokens
    put(host, tokens)
    used = host.used
    for depth in (7, 18):
        chunk = host.add_state(tokens[:depth])
        assert chunk is not None
        chunk.states[depth] = f"state {depth}"
    assert host.used == used + 2 * STATE_BYTES
    host.check_integrity()
    assert host.add_state(tokens[:7]) is None  # there is one
    for length, found in ((30, 18), (18, 18), (17, 7), (6, None)):
        state = host.match(tokens[:length], 4, strict=True).state
        assert (None if state is None else state[1]) == found
    put(host, tokens + 100)
    for depth in (3, 9, 12):
        assert host.add_state((tokens + 100)[:depth]) is not None
        host.check_integrity()
    assert host.match(tokens, 0, strict=True).length == 0  # its room was needed
    host.flush()
    assert host.used == 0


def test_chunks_are_as_large_as_leaves_several_in_the_memory() -> None:
    for chunks, rows in ((1, 8), (4 * LEAST_CHUNKS, 32), (1000, CHUNK_ROWS[-1])):
        host = store(chunks)
        runs = host.missing(np.arange(300 * PAGE, dtype=np.int32), 0, True)
        assert [run.stop for run in runs[:2]] == [rows, 2 * rows]


def test_only_pieces_with_group_inputs_take_their_bytes() -> None:
    with_inputs = np.zeros(100, bool)
    with_inputs[[33, 99]] = True
    assert input_pieces(with_inputs) == [range(32, 48), range(96, 100)]
    host = store()
    host.add(np.arange(100 * PAGE, dtype=np.int32), range(100), with_inputs, True)
    assert host.used == CHUNK_ROWS[-1] * PAGE_BYTES + (16 + 8) * INPUT_BYTES
    assert input_pieces(~np.ones(100, bool)) == []


def test_group_inputs_are_found_page_by_page_in_whatever_chunk_has_them() -> None:
    host, tokens = store(), np.arange(6 * PAGE, dtype=np.int32)
    none, some = np.zeros(6, bool), np.array([0, 1, 1, 0, 0, 0], bool)
    host.add(tokens, range(6), none, True)
    first = host.add(tokens, range(6), some, True)
    rest = host.add(tokens, range(3, 6), np.ones(3, bool), False)

    def of(pages: list[int], length: int, *, strict: bool = False) -> Any:
        return host.inputs_of(tokens[:length], np.array(pages), strict=strict)

    assert of([1, 2, 3, 5], 6 * PAGE) == [
        *((first, range(1, 3)), (rest, range(0, 1)), (rest, range(2, 3)))
    ]
    assert of([2, 3], 3 * PAGE + 1) == [(first, range(2, 3)), (rest, range(0, 1))]  # in a page
    assert of([2, 3], 4 * PAGE, strict=True) is None and of([1], 2 * PAGE, strict=True) is not None
    assert of([0, 1], 2 * PAGE) is None
    assert host.inputs_of(tokens + 1, np.array([1]), strict=False) is None
