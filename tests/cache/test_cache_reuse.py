"""What conversations and branches get back: faults that bit users of other servers."""

import numpy as np
import pytest

from jhybrid.cache.cache_manager import CacheManager
from tests.cache.simulated_engine import SimulatedEngine, tokens_of

GRID = 16


@pytest.mark.parametrize("length", [*range(2, 70), 128, 129, 191, 192, 193])
def test_the_identical_prompt_restores_all_but_one_token(length):
    engine = SimulatedEngine(total_pages=128, total_slots=32, checkpoint_interval=GRID)
    prompt = tokens_of(length, length)
    engine.run(prompt, answer=tokens_of(1, 5))
    for _ in range(2):
        assert engine.run(prompt).restored == length - 1


@pytest.mark.parametrize("suffix", [1, 40, 376, 1296])
def test_a_shared_prefix_is_restored_at_the_third_sighting(suffix):
    engine = SimulatedEngine(total_pages=4096, total_slots=512, checkpoint_interval=64)
    shared = tokens_of(0, 1500)
    restored = [engine.run(shared + [n] * suffix).restored for n in range(6)]
    assert restored[0] == 0
    assert restored[1] >= 1500 // 64 * 64
    assert restored[2:] == [1500] * 4


def test_the_branch_is_stored_even_when_slots_are_few():
    """The only checkpoint must not lie in the part that is nobody else's."""
    engine = SimulatedEngine(total_pages=1024, total_slots=8, checkpoint_interval=10**6)
    shared = tokens_of(0, 1500)
    restored = [engine.run(shared + tokens_of(n, 700)).restored for n in range(1, 7)]
    assert restored == [0, 0, 1500, 1500, 1500, 1500]


def test_a_conversation_prefills_only_what_is_new():
    engine = SimulatedEngine(total_pages=1024, total_slots=16, checkpoint_interval=64)
    history: list[int] = []
    for turn in range(10):
        history += tokens_of(turn, 200)
        before = engine.prefilled
        answer = tokens_of(100 + turn, 30)
        engine.run(history, answer)
        history += answer
        assert engine.prefilled - before == 200  # the answer's state was donated


def test_an_abort_keeps_what_was_computed():
    engine = SimulatedEngine(total_pages=256)
    prompt = tokens_of(0, 100)
    request = engine.admit(prompt, tokens_total=100)
    assert request is not None
    assert engine.step(request, 57, commit=False)
    engine.finish(request)
    assert engine.run(prompt).restored == 57


def test_preemption_keeps_kv_and_state_together():
    engine = SimulatedEngine()
    request = engine.admit(range(10), tokens_total=10)
    assert request is not None and engine.step(request, 10)
    request.tokens += [50, 51]
    assert engine.step(request, 11)
    engine.finish(request)
    again = engine.admit(request.tokens)
    assert again is not None
    assert (again.lease.matched, again.lease.restored) == (11, 11)


def test_admitted_and_never_run_leaks_nothing():
    engine = SimulatedEngine(total_pages=32)
    engine.run(range(30))
    before = engine.manager.stats()
    for n in range(200):
        request = engine.admit([*range(n % 31), 99, 98], tokens_total=40)
        assert request is not None
        engine.finish(request)
    after = engine.manager.stats()
    assert after.pools["native_slots"] == before.pools["native_slots"]
    assert after.pools["kv_pages"].running == 0
    engine.check_all()


def test_what_does_not_fit_waits_and_leaks_nothing():
    engine = SimulatedEngine(total_pages=8, total_slots=4)
    busy = engine.admit(range(20), tokens_total=20)
    assert busy is not None and engine.step(busy, 20)
    before = engine.manager.stats()
    for n in range(100):
        assert engine.admit([*range(n % 20), 77], tokens_total=40) is None
    assert engine.manager.stats() == before
    engine.finish(busy)
    assert engine.manager.stats().pools["kv_pages"].running == 0
    engine.check_all()


def test_four_slots_serve_thirty_two_requests():
    engine = SimulatedEngine(total_pages=64, total_slots=4, reserve=1)
    waiting = [[*tokens_of(n % 8, 12), n] for n in range(32)]
    finished = 0
    while finished < 32:
        while waiting and engine.admit(waiting[0], tokens_total=len(waiting[0])):
            waiting.pop(0)
        assert engine.running  # never stuck
        finished += engine.advance(5)
        engine.check_all()
    assert engine.manager.stats().pools["native_slots"].running == 0


def test_many_sessions_keep_their_newest_states():
    """128 sessions of 12 rounds, round robin, 512 slots: refreshing ancestors would lose them."""
    engine = SimulatedEngine(
        total_pages=20000, page_size=16, total_slots=512, checkpoint_interval=256
    )
    sessions = [tokens_of(n, 300) for n in range(128)]
    restored = total = 0
    for turn in range(12):
        for n, session in enumerate(sessions):
            lease = engine.run(session)
            restored, total = restored + lease.restored, total + len(session)
            session += tokens_of(1000 * turn + n, 100)
    assert restored / total > 0.8


def test_tokens_may_come_as_an_array():
    manager = CacheManager(8, 4, 2, 8)
    tokens = np.arange(6, dtype=np.int32)
    lease = manager.admit(tokens, 5, tokens_total=6)
    assert lease is not None
    lease.set_state_depth(6)
    manager.finish(lease, tokens)
    again = manager.admit(tuple(range(7)), 6)
    assert again is not None and again.restored == 6
