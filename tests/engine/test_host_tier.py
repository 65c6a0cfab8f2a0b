"""KV, group inputs and states that leave for host memory and come back on a hit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jhybrid.config import LayerConfig
from jhybrid.engine.engine import Engine
from jhybrid.engine.request import PrefixCacheOptions, RecoveryName
from jhybrid.engine.warm_up import warm_up

from .tiny import TINY, assert_greedy, assert_idle, request, run, tiny_engine

WHOLE = PrefixCacheOptions("tail-replay", 1.0)
DENSE = PrefixCacheOptions("dense")
FLAGS = {"recovery": "tail-replay", "host_memory": 64 * 2**20}


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 256, length)]


def offload(engine: Engine) -> None:
    """Everything cached moves to host memory."""
    engine.cache.offload()
    engine.host.offload()
    assert engine.cache.stats().pools["kv_pages"].tree == 0


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(**FLAGS)


@pytest.mark.parametrize("recovery", ["tail-replay", "anchored", "dense"])
def test_a_prefix_on_the_host_is_as_good_as_one_on_the_device(
    engine: Engine, recovery: RecoveryName
) -> None:
    rng = np.random.default_rng(0)
    assert engine.flush_cache()
    trunk = random_prompt(rng, 200)
    run(engine, [request("trunk", trunk)])
    offload(engine)
    before = engine.cache.stats().pools["host_bytes"].tree
    assert before > 0
    for cut in (200, 131, 64, 5):  # less and less of it in the tree, then more and more
        prompt = trunk[:cut] + random_prompt(rng, 9)
        options = PrefixCacheOptions(recovery, 1.0)
        result = run(engine, [request("hit", prompt, prefix_cache=options)])["hit"]
        assert result.usage.matched_tokens == cut
        if recovery != "dense":
            assert (result.usage.recovery, result.usage.cached_tokens) == (recovery, cut)
        assert_greedy(prompt, result.token_ids)
        offload(engine)
    assert_idle(engine)


@pytest.mark.parametrize("cut", [0, 3])
def test_a_dense_checkpoint_comes_back_with_its_prefix(engine: Engine, cut: int) -> None:
    """States where prefixes end or part go along: all of a conversation is reused, and a second
    hit finds the state on the device again."""
    rng = np.random.default_rng(6)
    assert engine.flush_cache()
    trunk = random_prompt(rng, 150 + cut)
    said = run(engine, [request("trunk", trunk)])["trunk"].token_ids
    history = trunk + said[:-1]
    other = history[: 100 + cut] + random_prompt(rng, 5)
    run(engine, [request("other", other, prefix_cache=DENSE)])
    for shared in (100 + cut, len(history)):
        offload(engine)
        for _ in range(2):
            prompt = history[:shared] + random_prompt(rng, 9)
            result = run(engine, [request("hit", prompt, prefix_cache=DENSE)])["hit"]
            usage = result.usage
            assert (usage.recovery, usage.restored_tokens) == ("dense", shared)
            assert usage.reason is None
            assert_greedy(prompt, result.token_ids)
    assert_idle(engine)


def test_short_pools_move_conversations_out_and_back() -> None:
    """Three conversations that fit one at a time; nobody recomputes what was said."""
    rng = np.random.default_rng(1)
    engine = tiny_engine(**FLAGS, pages=64)
    talks = {f"c{n}": random_prompt(rng, 150) for n in range(3)}
    for turn in range(3):
        for name, history in talks.items():
            options = PrefixCacheOptions("tail-replay", 1.0)
            result = run(engine, [request(name, history, prefix_cache=options)])[name]
            assert_greedy(history, result.token_ids)
            if turn:
                assert result.usage.cached_tokens >= len(history) - 21
            talks[name] = history + result.token_ids + random_prompt(rng, 20)
    assert engine.metrics().evictions["kv_pages"] > 0
    assert_idle(engine)


def test_decodes_run_on_while_kv_arrives(engine: Engine) -> None:
    """A running request gets a token every step, whatever is on its way for another one."""
    rng = np.random.default_rng(2)
    assert engine.flush_cache()
    trunk = random_prompt(rng, 250)
    run(engine, [request("trunk", trunk)])
    offload(engine)
    talking = random_prompt(rng, 20)
    engine.add(request("talking", talking, max_tokens=40))
    spoken: list[int] = []
    while len(spoken) < 5:
        spoken += [t for update in engine.step() for t in update.token_ids]
    prompt = trunk + [1, 2, 3]
    engine.add(request("hit", prompt, prefix_cache=WHOLE))
    arrived: list[int] = []
    while engine.has_work():
        updates = engine.step()
        names = [update.request_id for update in updates]
        if len(spoken) < 40 and not arrived:
            assert "talking" in names
        for update in updates:
            (spoken if update.request_id == "talking" else arrived).extend(update.token_ids)
    assert_greedy(talking, spoken)
    assert_greedy(prompt, arrived)


@pytest.mark.parametrize("host_memory", [FLAGS["host_memory"], 400 * 2**10])
def test_aborts_in_transfers_and_replays_leave_nothing(host_memory: int) -> None:
    """With little memory chunks are small: not all of a prefix is sent in one step."""
    rng = np.random.default_rng(3)
    flags: dict[str, Any] = FLAGS | {"host_memory": host_memory}
    engine = tiny_engine(**flags, pages=120, slots=6)
    trunk = random_prompt(rng, 250)
    run(engine, [request("trunk", trunk)])
    offload(engine)
    texts: dict[str, tuple[list[int], list[int]]] = {}
    for n in range(100):
        prompt = trunk[: int(rng.integers(10, 250))] + random_prompt(rng, int(rng.integers(1, 30)))
        texts[f"a{n}"] = (prompt, [])
        options = DENSE if n % 3 == 0 else WHOLE
        engine.add(request(f"a{n}", prompt, max_tokens=5, prefix_cache=options))
    aborted = set()
    while engine.has_work():
        if rng.random() < 0.8:
            aborted.add(f"a{int(rng.integers(100))}")
            engine.abort(f"a{int(rng.integers(100))}")
        if rng.random() < 0.1:
            engine.cache.offload()
        for update in engine.step():
            texts[update.request_id][1].extend(update.token_ids)
        engine.cache.check_integrity()
    for prompt, tokens in list(texts.values())[::4]:
        if tokens:
            assert_greedy(prompt, tokens)
    assert_idle(engine)
    assert engine.host.arriving == 0
    assert engine.flush_cache()
    pools = engine.cache.stats().pools
    assert pools["host_bytes"].free == pools["host_bytes"].total
    assert pools["kv_pages"].free == pools["kv_pages"].total
    assert pools["native_slots"].free == pools["native_slots"].total
    assert pools["group_inputs"].free == pools["group_inputs"].total


def test_a_small_host_memory_forgets_the_oldest() -> None:
    rng = np.random.default_rng(4)
    engine = tiny_engine(recovery="tail-replay", host_memory=400 * 2**10)
    for n in range(8):
        run(engine, [request(f"p{n}", random_prompt(rng, 100))])
        offload(engine)
        engine.cache.check_integrity()
    assert engine.metrics().evictions["host_bytes"] > 0
    assert engine.metrics().pools["host_bytes"]["tree"] <= 400 * 2**10


def test_nothing_compiles_for_transfers_once_warm(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(**FLAGS, max_running=2, max_prefill_tokens=32, tp=2, own_programs=True)
    for _ in warm_up(engine.runner):
        pass
    before = engine.metrics().compilations
    rng = np.random.default_rng(5)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        trunk = random_prompt(rng, 150)
        run(engine, [request("trunk", trunk)])
        offload(engine)
        result = run(engine, [request("hit", trunk[:100] + [1, 2], prefix_cache=WHOLE)])["hit"]
    assert [r.message for r in caplog.records if "ompil" in r.message] == []
    assert engine.metrics().compilations == before
    assert result.usage.cached_tokens == 100
    assert_greedy(trunk[:100] + [1, 2], result.token_ids)


def test_a_prefix_goes_in_whole_chunks_though_it_leaves_node_by_node() -> None:
    """A long prompt is a chain of nodes of one checkpoint interval; what comes back is not padded
    and not many transfers."""
    rng = np.random.default_rng(7)
    engine = tiny_engine(**FLAGS)
    trunk = random_prompt(rng, 500)  # with its answer 64 pages, in nodes of 4
    run(engine, [request("trunk", trunk)])
    engine.cache.offload()
    chunks = [offload.chunk for offload in engine.cache.take_offloads()]
    rows = sorted({id(chunk): chunk.rows for chunk in chunks}.values())
    assert rows == [64]


@pytest.mark.parametrize("recovery", ["tail-replay", "anchored", "dense"])
def test_a_model_whose_only_group_reads_token_ids_moves_no_inputs(recovery: RecoveryName) -> None:
    rng = np.random.default_rng(8)
    model = replace(TINY, layers=tuple(LayerConfig(kind) for kind in ("linear", "full")))
    engine = tiny_engine(model, **FLAGS)
    trunk = random_prompt(rng, 100)
    prompt = trunk[:70] + random_prompt(rng, 5)
    texts = []
    run(engine, [request("trunk", trunk)])
    for asked in (recovery, "off"):
        offload(engine)
        options = PrefixCacheOptions(asked, 1.0)
        result = run(engine, [request("hit", prompt, prefix_cache=options)])["hit"]
        texts.append(result.token_ids)
        assert result.usage.matched_tokens == (0 if asked == "off" else 70)
    assert texts[0] == texts[1]
    assert_idle(engine)
