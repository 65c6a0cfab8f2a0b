"""What an engine compiles and holds, on one device and over ranks, and how long its queue gets."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jhybrid.engine.request import QueueFull, Request
from jhybrid.engine.warm_up import warm_up, warm_up_calls

from .tiny import assert_greedy, assert_idle, random_prompt, request, run, tiny_engine


def test_queue_is_bounded() -> None:
    engine = tiny_engine(max_queue=2)
    for n in range(2):
        engine.add(request(f"q{n}", [1, 2]))
    with pytest.raises(QueueFull, match="2"):
        engine.add(request("q2", [1, 2]))
    while engine.has_work():
        engine.step()
    assert_idle(engine)


def again(r: Request) -> Request:
    """The same prompt and some more, so that it hits."""
    params = replace(r.params, prompt_logprobs=None)
    return replace(r, params=params, prompt_token_ids=(*r.prompt_token_ids, 1, 2, 3))


@pytest.mark.parametrize("recovery", ["dense", "dasc-wr"])
def test_nothing_compiles_once_warm(recovery: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(
        max_running=2,
        max_prefill_tokens=32,
        recovery=recovery,
        slots=6,
        compressed_slots=8,
        watermark=2,
        own_programs=True,
    )
    for _ in warm_up(engine.runner):
        pass
    rng = np.random.default_rng(10)
    before = engine.metrics().compilations
    with jax.log_compiles(), caplog.at_level("WARNING"):
        prompts = [random_prompt(rng, int(n)) for n in rng.integers(1, 120, 12)]
        requests = [
            request(
                f"r{n}",
                p,
                temperature=float(n % 2),
                logprobs=3 if n % 3 == 0 else None,
                prompt_logprobs=2 if n % 4 == 0 else None,
                repetition_penalty=1.2 if n % 5 == 0 else 1.0,
                seed=n,
            )
            for n, p in enumerate(prompts)
        ]
        run(engine, requests)
        kinds = {r.usage.recovery for r in run(engine, [again(r) for r in requests]).values()}
    assert recovery in kinds
    compiled = [r.message for r in caplog.records if "ompil" in r.message]
    assert compiled == []
    assert engine.metrics().compilations == before


def test_steps_hold_no_second_copy_of_a_pool() -> None:
    engine = tiny_engine(
        pages=20000,
        slots=4000,
        compressed_slots=8000,
        w_max=16,
        max_running=2,
        max_prefill_tokens=32,
    )
    smallest = min(engine.runner.pool_bytes().values())
    for call, size, args in warm_up_calls(engine.runner):
        if call.startswith(("prefill", "decode", "copy_pages", "store_states", "load_states")):
            compiled = engine.runner.programs.compile(call, args)
            temporary = compiled.memory_analysis().temp_size_in_bytes
            assert temporary < smallest / 4, (call, size, temporary)


def test_tensor_parallel_gives_the_same_tokens() -> None:
    """Four ranks, so that KV heads are copies; recoveries run over two."""
    rng = np.random.default_rng(11)
    engine = tiny_engine(tp=4)
    shared = random_prompt(rng, 45)
    prompts = {f"p{n}": shared[: 9 * n] + random_prompt(rng, 20) for n in range(6)}
    for _ in range(2):
        results = run(engine, [request(name, p, max_tokens=16) for name, p in prompts.items()])
        for name, prompt in prompts.items():
            assert_greedy(prompt, results[name].token_ids)
    assert_idle(engine)


def test_bfloat16_model_agrees_with_itself_cached_and_cold() -> None:
    """Parameters, KV and conv windows in bfloat16, states in float32: one run a second time."""
    engine = tiny_engine(dtype="bfloat16")
    prompt = random_prompt(np.random.default_rng(12), 70)
    cold = run(engine, [request("cold", prompt, max_tokens=12, logprobs=1)])["cold"]
    warm = run(engine, [request("warm", prompt, max_tokens=12, logprobs=1)])["warm"]
    assert warm.usage.restored_tokens == 69
    assert engine.runner.caches.keys.dtype == engine.runner.caches.conv.dtype == "bfloat16"
    assert engine.runner.caches.recurrent.dtype == "float32"
    pairs = zip(cold.updates, warm.updates, strict=True)
    for (old,), (new,) in ((a.logprobs, b.logprobs) for a, b in pairs):
        assert abs(old.logprob - new.logprob) < 0.05
        if old.token_id != new.token_id:  # only where two tokens are nearly as likely
            assert abs(old.logprob - new.logprob) < 0.15
            break
