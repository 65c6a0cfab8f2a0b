"""Group inputs come from host memory for pages whose KV is on the device already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.engine.engine import Engine
from jhybrid.engine.request import PrefixCacheOptions

from .tiny import Result, assert_greedy, assert_idle, request, run, tiny_engine


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(recovery="tail-replay", host_memory=2**22)


def trunk_on_host(engine: Engine) -> list[int]:
    """Cached in host memory alone; what is left of its inputs on the device is wrong."""
    trunk = np.random.default_rng(0).integers(0, 256, 250).tolist()
    run(engine, [request("trunk", trunk)])
    engine.cache.offload()
    engine.host.offload()
    caches = engine.runner.caches
    wrong = jax.tree.map(lambda x: jnp.full_like(x, 3.7), caches.group_inputs)
    engine.runner.caches = replace(caches, group_inputs=wrong)
    return trunk


def hit(engine: Engine, prompt: list[int], recovery: Any, ratio: float) -> Result:
    options = PrefixCacheOptions(recovery, ratio)
    return run(engine, [request("hit", prompt, max_tokens=6, prefix_cache=options)])["hit"]


@pytest.mark.parametrize("before", [("tail-replay", 0.1), ("dense", None)])
@pytest.mark.parametrize("cut", [33, 150, 152, 239])
def test_a_shorter_hit_replays_what_a_longer_one_left_on_the_host(
    engine: Engine, cut: int, before: tuple[Any, Any]
) -> None:
    trunk = trunk_on_host(engine)
    hit(engine, [*trunk, 1, 2], *before)
    prompt = [*trunk[:cut], 7, 8, 9]
    result = hit(engine, prompt, "tail-replay", 1.0)
    usage = result.usage
    assert (usage.recovery, usage.cached_tokens, usage.replayed_tokens) == ("tail-replay", cut, cut)
    assert_greedy(prompt, result.token_ids)
    again = hit(engine, [*trunk[:cut], 5, 6], "anchored", 1.0)
    assert again.usage.cached_tokens == cut
    assert_greedy([*trunk[:cut], 5, 6], again.token_ids)
    assert_idle(engine)


def test_beside_decodes_too(engine: Engine) -> None:
    trunk = trunk_on_host(engine)
    hit(engine, [*trunk, 1, 2], "tail-replay", 0.1)
    engine.add(request("talking", trunk[::-1][:20], max_tokens=30))
    engine.step()
    options = PrefixCacheOptions("tail-replay", 1.0)
    prompts = {f"p{cut}": [*trunk[:cut], cut] for cut in (60, 171)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=5, prefix_cache=options))
    answers, reused = dict[str, list[int]](), dict[str, int]()
    while engine.has_work():
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.token_ids)
            if update.prefix_cache is not None:
                reused[update.request_id] = update.prefix_cache.cached_tokens
        assert engine.host.arriving == 0  # nothing but what has been put
    assert {name: reused[name] for name in prompts} == {"p60": 60, "p171": 171}
    for name, prompt in prompts.items():
        assert_greedy(prompt, answers[name])
    assert_greedy(trunk[::-1][:20], answers["talking"])
    assert_idle(engine)


def test_while_others_hold_the_room_for_them_nothing_is_replayed() -> None:
    engine = tiny_engine(recovery="tail-replay", host_memory=2**22, input_pages=40)
    trunk = trunk_on_host(engine)
    hit(engine, [*trunk, 1, 2], "tail-replay", 0.1)
    other = np.random.default_rng(1).integers(0, 256, 280).tolist()
    engine.add(request("long", other, max_tokens=30))
    while not engine.scheduler.decoding:
        engine.step()
    prompt, options = [*trunk[:150], 7], PrefixCacheOptions("tail-replay", 1.0)
    engine.add(request("hit", prompt, max_tokens=6, prefix_cache=options))
    answer, used = list[int](), list[Any]()
    while engine.has_work():
        for update in engine.step():
            if update.request_id == "hit":
                answer += update.token_ids
                used += [update.prefix_cache] if update.prefix_cache else []
        engine.cache.check_integrity()
    assert (used[0].recovery, used[0].reason) == ("dense", "no_group_inputs")
    assert_greedy(prompt, answer)
    short = hit(engine, [*trunk[:150], 9], "tail-replay", 1.0)
    assert (short.usage.recovery, short.usage.replayed_tokens) == ("tail-replay", 150)
    assert_idle(engine)
