"""The engine against an uncached oracle: batching, reuse, pressure, aborts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jhybrid.engine.engine import Engine
from jhybrid.engine.request import PrefixCacheOptions

from .tiny import (
    assert_greedy,
    assert_idle,
    oracle_logits,
    random_prompt,
    request,
    run,
    tiny_engine,
)

LENGTHS = (1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 97, 130, 200)


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    return tiny_engine()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    assert shared_engine.flush_cache()
    yield shared_engine
    assert_idle(shared_engine)


def test_batch_equals_oracle_cold_and_cached(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    prompts = {f"p{n}": random_prompt(rng, n) for n in LENGTHS}
    for sighting in range(2):
        results = run(engine, [request(name, p, max_tokens=20) for name, p in prompts.items()])
        for name, prompt in prompts.items():
            assert_greedy(prompt, results[name].token_ids)
            assert len(results[name].token_ids) == 20
            assert results[name].last.finish_reason == "length"
            # the identical prompt resumes one token short of its end
            assert results[name].usage.restored_tokens == sighting * (len(prompt) - 1)


def test_turns_prefill_only_what_is_new(engine: Engine) -> None:
    rng = np.random.default_rng(1)
    history, known = random_prompt(rng, 40), 0
    for turn in range(10):
        output = run(engine, [request(f"turn{turn}", history, max_tokens=12)])[f"turn{turn}"]
        assert_greedy(history, output.token_ids)
        if turn:
            new = len(history) - known
            prefilled = len(history) - output.usage.cached_tokens
            assert prefilled <= new + engine.config.page_size
        known = len(history) + len(output.token_ids)
        history = history + output.token_ids + random_prompt(rng, 15)


def test_branches_reuse_the_shared_part(engine: Engine) -> None:
    """The second prompt finds the branch and leaves a checkpoint there; the third stands on it."""
    rng = np.random.default_rng(2)
    shared = random_prompt(rng, 75)
    restored = []
    for n in range(4):
        prompt = shared + [n] + random_prompt(rng, 30)
        result = run(engine, [request(f"b{n}", prompt)])[f"b{n}"]
        assert_greedy(prompt, result.token_ids)
        restored.append((result.usage.matched_tokens, result.usage.restored_tokens))
    grid = 75 // engine.config.checkpoint_interval * engine.config.checkpoint_interval
    assert restored == [(0, 0), (75, grid), (75, 75), (75, 75)]


def test_burst_of_coprime_lengths_then_each_alone(engine: Engine) -> None:
    """Each prompt of one packed prefill leaves its checkpoint at its own depth."""
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, n) for n in (11, 13, 17, 19, 23, 29, 31, 37)]
    run(engine, [request(f"first{n}", p) for n, p in enumerate(prompts)])
    for n, prompt in enumerate(prompts):
        longer = prompt + random_prompt(rng, 50)
        result = run(engine, [request(f"again{n}", longer)])[f"again{n}"]
        assert result.usage.restored_tokens >= len(prompt) - 1
        assert_greedy(longer, result.token_ids)


def test_prefill_beside_running_decodes(engine: Engine) -> None:
    """Checkpoints taken while other requests decode hold the right state."""
    rng = np.random.default_rng(4)
    long = {f"long{n}": random_prompt(rng, 20) for n in range(2)}
    short = {f"short{n}": random_prompt(rng, 40 + n) for n in range(12)}
    requests = [request(name, p, max_tokens=100) for name, p in long.items()]
    requests += [request(name, p, max_tokens=3) for name, p in short.items()]
    results = run(engine, requests)
    for name, prompt in {**long, **short}.items():
        assert_greedy(prompt, results[name].token_ids)
    for name, prompt in short.items():
        again = run(engine, [request(name, prompt + [1, 2, 3])])[name]
        assert again.usage.restored_tokens >= len(prompt) - 1
        assert_greedy(prompt + [1, 2, 3], again.token_ids)


def test_pressure_preempts_and_loses_nothing() -> None:
    rng = np.random.default_rng(5)
    engine = tiny_engine(pages=64, slots=5)  # room for one longest request; four want to run
    prompts = {f"p{n}": random_prompt(rng, 60 + 7 * n) for n in range(8)}
    results = run(engine, [request(name, p, max_tokens=80) for name, p in prompts.items()])
    for name, prompt in prompts.items():
        assert len(results[name].token_ids) == 80
        assert_greedy(prompt, results[name].token_ids)
    assert engine.metrics().preemptions > 0
    assert_idle(engine)


def test_prompt_logprobs_survive_preemption_in_the_middle_of_a_prompt() -> None:
    """A prompt that starts again reports each of its tokens once."""
    rng = np.random.default_rng(12)
    engine = tiny_engine(pages=64)  # all taken once both are admitted
    first, second = random_prompt(rng, 60), random_prompt(rng, 446)
    results = run(
        engine,
        [
            request("first", first, max_tokens=60),
            request("second", second, max_tokens=2, prompt_logprobs=0),
        ],
    )
    assert engine.metrics().preemptions > 0
    scores = results["second"].updates[0].prompt_logprobs
    assert scores is not None and scores[0] is None
    assert [s.token_id for s in scores[1:] if s] == second[1:]
    rows = oracle_logits(second)[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    expected = rows[np.arange(len(second) - 1), second[1:]]
    found = [s.logprob for s in scores[1:] if s]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert_idle(engine)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**31},
        {"top_k": 10**20},
        {"top_p": 1e-60, "temperature": 1.0},
        {"temperature": 1e-300},
        {"max_tokens": None, "min_tokens": 2**40},
        {"seed": -(2**63), "temperature": 1.0},
        {"seed": 2**64 - 1, "temperature": 1.0},
    ],
    ids=str,
)
def test_extreme_values_do_not_stop_the_engine(engine: Engine, params: dict[str, Any]) -> None:
    prompt = random_prompt(np.random.default_rng(13), 500)
    result = run(engine, [request("extreme", prompt, **params)])["extreme"]
    assert result.last.finish_reason == "length"
    if params.get("temperature", 0) < 1 or "top_p" in params:  # only the best token is left
        assert_greedy(prompt, result.token_ids)


def test_more_requests_than_slots_all_finish() -> None:
    rng = np.random.default_rng(6)
    engine = tiny_engine(slots=1)
    prompts = {f"p{n}": random_prompt(rng, 10 + n) for n in range(6)}
    results = run(engine, [request(name, p) for name, p in prompts.items()])
    for name, prompt in prompts.items():
        assert_greedy(prompt, results[name].token_ids)
    assert_idle(engine)


def test_aborts_at_any_time_free_everything(engine: Engine) -> None:
    rng = np.random.default_rng(7)
    shared = random_prompt(rng, 50)
    survivors = {}
    for n in range(60):
        prompt = shared[: int(rng.integers(1, 50))] + random_prompt(rng, int(rng.integers(1, 90)))
        engine.add(request(f"a{n}", prompt, max_tokens=30))
        survivors[f"a{n}"] = (prompt, [])
    ended = set()
    while engine.has_work():
        if rng.random() < 0.5:
            engine.abort(f"a{int(rng.integers(60))}")
        for update in engine.step():
            assert update.request_id not in ended
            survivors[update.request_id][1].extend(update.token_ids)
            if update.finish_reason:
                ended.add(update.request_id)
        engine.cache.check_integrity()
    assert len(ended) == 60
    for prompt, tokens in survivors.values():
        if tokens:
            assert_greedy(prompt, tokens)


def test_an_aborted_stream_leaves_its_prefix(engine: Engine) -> None:
    prompt = random_prompt(np.random.default_rng(8), 30)
    engine.add(request("cut", prompt, max_tokens=100))
    tokens: list[int] = []
    while len(tokens) < 20:
        for update in engine.step():
            tokens += update.token_ids
    engine.abort("cut")
    while engine.has_work():
        engine.step()
    again = run(engine, [request("again", prompt + tokens + [5, 6])])["again"]
    assert again.usage.restored_tokens >= len(prompt) + 19


def test_recoveries_off_and_zero(engine: Engine) -> None:
    prompt = random_prompt(np.random.default_rng(9), 60)
    run(engine, [request("prime", prompt)])
    off = request("off", prompt, prefix_cache=PrefixCacheOptions("off"))
    result = run(engine, [off])["off"]
    assert (result.usage.recovery, result.usage.matched_tokens) == ("off", 0)
    assert result.usage.reason == "disabled"
    assert_greedy(prompt, result.token_ids)

    zero = request("zero", prompt + [1] * 9, prefix_cache=PrefixCacheOptions("zero"))
    result = run(engine, [zero])["zero"]
    assert result.usage.recovery == "zero"
    assert result.usage.matched_tokens >= 60
    assert result.usage.restored_tokens == 0
    # what an approximate request computed must not be found by an exact one
    exact = run(engine, [request("exact", prompt + [1] * 9 + result.token_ids)])["exact"]
    assert exact.usage.matched_tokens <= 60 + 8
    assert_greedy(prompt + [1] * 9 + result.token_ids, exact.token_ids)


def test_bad_requests_are_refused_by_field(engine: Engine) -> None:
    for bad, field in (
        (request("empty", []), "prompt"),
        (request("long", [1] * 512), "prompt"),
        (request("token", [1, 263]), "prompt"),
        (request("negative", [-1]), "prompt"),
        (request("bias", [1], logit_bias={400: 1.0}), "logit_bias"),
        (request("stop", [1], stop_token_ids=[-3]), "stop_token_ids"),
        (request("recovery", [1], prefix_cache=PrefixCacheOptions("dasc-nr")), "prefix_cache"),
    ):
        with pytest.raises(ValueError, match=f"^{field}"):
            engine.add(bad)
    assert not engine.has_work()
