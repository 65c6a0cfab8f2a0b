"""Tail-replay and anchored recovery behind a whole engine: reuse that ends at any token."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jhybrid.engine.engine import Engine
from jhybrid.engine.programs import PREFILL
from jhybrid.engine.request import PrefixCacheOptions, PrefixCacheUsage, RecoveryName
from jhybrid.engine.warm_up import warm_up, warm_up_calls

from .tiny import assert_greedy, assert_idle, request, run, tiny_engine

WHOLE = PrefixCacheOptions("tail-replay", 1.0)


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 256, length)]


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    return tiny_engine(recovery="tail-replay")


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    assert shared_engine.flush_cache()
    yield shared_engine
    assert_idle(shared_engine)


def usage(
    engine: Engine, prompt: list[int], recovery: RecoveryName, ratio: float | None = None
) -> PrefixCacheUsage:
    options = PrefixCacheOptions(recovery, ratio)
    return run(engine, [request("one", prompt, prefix_cache=options)])["one"].usage


def test_whole_replay_is_exact_at_every_branch_point(engine: Engine) -> None:
    """r = 1: greedy text equals the uncached model's, wherever the match ends."""
    rng = np.random.default_rng(0)
    trunk = random_prompt(rng, 150)
    run(engine, [request("trunk", trunk)])
    for cut in (1, 7, 8, 9, 63, 64, 65, 100, 149):
        prompt = trunk[:cut] + [255 - trunk[cut]] + random_prompt(rng, 20)
        name = f"cut{cut}"
        result = run(engine, [request(name, prompt, prefix_cache=WHOLE)])[name]
        used = result.usage
        assert used.recovery == "tail-replay" and used.reason is None
        assert used.matched_tokens == used.cached_tokens == used.replayed_tokens == cut
        assert used.restored_tokens == 0
        assert_greedy(prompt, result.token_ids)


def test_turns_and_branches_reuse_all_that_matches(engine: Engine) -> None:
    """Where dense falls back to the last checkpoint, tail-replay starts at the exact token."""
    rng = np.random.default_rng(1)
    history, known = random_prompt(rng, 40), 0
    for turn in range(6):
        name = f"turn{turn}"
        result = run(engine, [request(name, history, max_tokens=12)])[name]
        assert result.usage.cached_tokens == result.usage.matched_tokens == known
        assert result.usage.replayed_tokens == -(-known // 10)  # the server's ratio is 0.1
        known = len(history) + len(result.token_ids) - 1  # the last token has not run
        history = history + result.token_ids + random_prompt(rng, 15)
    shared = random_prompt(rng, 75)
    run(engine, [request("first", shared + random_prompt(rng, 30))])
    dense = usage(engine, shared + [1, 2, 3], "dense")
    assert (dense.matched_tokens, dense.cached_tokens, dense.reason) == (75, 64, "no_checkpoint")
    replayed = usage(engine, shared + [4, 5, 6], "tail-replay")
    assert (replayed.matched_tokens, replayed.cached_tokens) == (75, 75)


def test_anchored_from_dense_checkpoints_is_exact(engine: Engine) -> None:
    rng = np.random.default_rng(2)
    trunk = random_prompt(rng, 150)
    run(engine, [request("trunk", trunk)])
    for cut in (20, 33, 64, 90, 100, 140):  # checkpoints are at multiples of 32
        prompt = trunk[:cut] + [255 - trunk[cut]] + random_prompt(rng, 20)
        options = PrefixCacheOptions("anchored", 1.0)
        result = run(engine, [request("a", prompt, prefix_cache=options)])["a"]
        used, checkpoint = result.usage, cut // 32 * 32
        assert (used.recovery, used.reason) == ("anchored", None)
        assert (used.matched_tokens, used.cached_tokens) == (cut, cut)
        assert (used.restored_tokens, used.replayed_tokens) == (checkpoint, cut - checkpoint)
        assert_greedy(prompt, result.token_ids)
        # its own checkpoints are exact, and so found by exact requests
        again = run(engine, [request("d", prompt, prefix_cache=PrefixCacheOptions("dense"))])["d"]
        assert again.usage.restored_tokens == len(prompt) - 1
        assert_greedy(prompt, again.token_ids)


def test_a_far_checkpoint_makes_it_a_tail_replay(engine: Engine) -> None:
    rng = np.random.default_rng(3)
    trunk = random_prompt(rng, 150)
    run(engine, [request("trunk", trunk)])
    used = usage(engine, trunk[:90] + [1] * 5, "anchored", 0.1)
    assert (used.recovery, used.reason, used.replayed_tokens) == (
        "tail-replay",
        "far_checkpoint",
        9,
    )


def test_what_is_approximate_is_not_found_by_exact_requests(engine: Engine) -> None:
    rng = np.random.default_rng(4)
    trunk = random_prompt(rng, 100)
    run(engine, [request("trunk", trunk)])
    prompt = trunk[:90] + random_prompt(rng, 30)
    approximate = run(engine, [request("a", prompt)])["a"]
    assert approximate.usage.replayed_tokens == 9
    longer = prompt + approximate.token_ids
    exact = run(engine, [request("e", longer, prefix_cache=PrefixCacheOptions("dense"))])["e"]
    assert exact.usage.matched_tokens == 90
    assert_greedy(longer, exact.token_ids)
    assert usage(engine, longer, "tail-replay").matched_tokens == len(longer) - 1


def test_without_the_inputs_it_falls_back_and_says_so() -> None:
    """tail:N keeps what is before the ends of prompts and requests."""
    rng = np.random.default_rng(5)
    engine = tiny_engine(group_inputs="tail:24", input_pages=30, pages=200)
    trunk = random_prompt(rng, 150)
    output = run(engine, [request("trunk", trunk, max_tokens=60)])["trunk"].token_ids
    for cut, kept in ((100, False), (140, True), (150, True), (180, False), (205, True)):
        prompt = (trunk + output)[:cut] + [3, 5, 7]
        used = usage(engine, prompt, "tail-replay", 0.1)
        expected = ("tail-replay", None) if kept else ("dense", "no_group_inputs")
        assert (used.recovery, used.reason) == expected, cut
        assert used.cached_tokens == (used.matched_tokens if kept else used.restored_tokens)
    for n in range(6):  # more than the pages hold: the oldest go
        run(engine, [request(f"n{n}", random_prompt(rng, 60))])
        engine.cache.check_integrity()
    assert usage(engine, trunk[:140] + [9, 9], "tail-replay").reason == "no_group_inputs"
    assert engine.metrics().evictions["group_inputs"] > 0
    assert_idle(engine)


def test_replays_beside_other_requests_under_pressure() -> None:
    """Preemptions, short pools and replays in pieces; every exact answer is the model's."""
    rng = np.random.default_rng(6)
    engine = tiny_engine(recovery="tail-replay", pages=64, slots=5)
    trunk = random_prompt(rng, 120)
    run(engine, [request("trunk", trunk, max_tokens=2)])
    prompts = {f"p{n}": trunk[: 20 + 12 * n] + random_prompt(rng, 25) for n in range(8)}
    results = run(
        engine, [request(n, p, max_tokens=110, prefix_cache=WHOLE) for n, p in prompts.items()]
    )
    assert engine.metrics().preemptions > 0
    for name, prompt in prompts.items():
        assert len(results[name].token_ids) == 110
        assert_greedy(prompt, results[name].token_ids)
    assert_idle(engine)


def test_aborts_during_replays_free_everything(engine: Engine) -> None:
    rng = np.random.default_rng(7)
    trunk = random_prompt(rng, 200)
    run(engine, [request("trunk", trunk)])
    before = engine.metrics().pools["kv_pages"]["running"]
    texts: dict[str, tuple[list[int], list[int]]] = {}
    for n in range(100):
        cut = int(rng.integers(20, 200))
        prompt = trunk[:cut] + random_prompt(rng, int(rng.integers(1, 40)))
        engine.add(request(f"a{n}", prompt, max_tokens=6, prefix_cache=WHOLE))
        texts[f"a{n}"] = (prompt, [])
    while engine.has_work():
        if rng.random() < 0.7:
            engine.abort(f"a{int(rng.integers(100))}")
        for update in engine.step():
            texts[update.request_id][1].extend(update.token_ids)
        engine.cache.check_integrity()
    for prompt, tokens in list(texts.values())[::5]:
        if tokens:
            assert_greedy(prompt, tokens)
    assert engine.metrics().pools["kv_pages"]["running"] == before == 0


def test_nothing_compiles_once_warm(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(
        recovery="anchored", max_running=2, max_prefill_tokens=32, own_programs=True
    )
    for _ in warm_up(engine.runner):
        pass
    rng = np.random.default_rng(8)
    before = engine.metrics().compilations
    trunk = random_prompt(rng, 150)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for cut in (0, 20, 90, 140):
            run(engine, [request(f"c{cut}", trunk[:cut] + random_prompt(rng, 60))])
            run(engine, [request(f"t{cut}", trunk[: cut + 5], prefix_cache=WHOLE)])
    assert [r.message for r in caplog.records if "ompil" in r.message] == []
    assert engine.metrics().compilations == before


def test_replays_hold_no_second_copy_of_a_pool() -> None:
    engine = tiny_engine(recovery="anchored", pages=20000, slots=4000, max_running=2)
    smallest = min(engine.runner.pool_bytes().values())
    calls = [c for c in warm_up_calls(engine.runner) if c[0] in ("replay", *PREFILL, "decode")]
    for call, size, args in calls:
        temporary = engine.runner.programs.compile(call, args).memory_analysis().temp_size_in_bytes
        assert temporary < smallest / 4, (call, size, temporary)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), "x", True])
def test_bad_ratios_are_refused(engine: Engine, ratio: float) -> None:
    options = PrefixCacheOptions("tail-replay", ratio)
    with pytest.raises(ValueError, match="^prefix_cache.replay_ratio"):
        engine.add(request("bad", [1], prefix_cache=options))


@pytest.mark.parametrize("dtype", ["fp8", "model"])
def test_group_input_dtypes_over_ranks(dtype: str) -> None:
    rng = np.random.default_rng(9)
    engine = tiny_engine(tp=2, recovery="anchored", group_input_dtype=dtype, replay_ratio=1.0)
    trunk = random_prompt(rng, 60)
    run(engine, [request("trunk", trunk)])
    prompt = trunk[:50] + random_prompt(rng, 20)
    result = run(engine, [request("hit", prompt)])["hit"]
    assert (result.usage.recovery, result.usage.cached_tokens) == ("anchored", 50)
    if dtype == "model":
        assert_greedy(prompt, result.token_ids)
    exact = run(engine, [request("e", prompt, prefix_cache=PrefixCacheOptions("dense"))])["e"]
    assert exact.usage.matched_tokens == (50 if dtype == "fp8" else len(prompt) - 1)
    assert_greedy(prompt, exact.token_ids)
