"""How transfers are cut into calls, and the order in which a step sends them to the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.cache.host_store import CHUNK_ROWS
from jhybrid.engine.engine import Engine
from jhybrid.engine.host_moves import PUTS, ROW_SIZES, put_order, put_sizes
from jhybrid.engine.host_tier import STEP_PARTS
from jhybrid.engine.request import PrefixCacheOptions
from jhybrid.models.pages import KV, PageKind

from .tiny import assert_greedy, assert_idle, oracle_logits, request, run, tiny_engine

SMALL_CHUNKS = {"recovery": "tail-replay", "host_memory": 400 * 2**10}  # of 8 pages
HIT = PrefixCacheOptions("tail-replay", 1.0)


@pytest.mark.parametrize("kind", [*KV, "inputs", "states"])
@pytest.mark.parametrize("count", [1, 2, 3, 16, 37])
@pytest.mark.parametrize("most", [0, 5, 100])
def test_parts_are_put_once_each_in_calls_that_are_compiled(
    kind: PageKind, count: int, most: int
) -> None:
    rng = np.random.default_rng(count)
    pages, parts = iter(rng.permutation(10_000).tolist()), []
    for n in range(count):
        size = int(rng.choice(ROW_SIZES[kind]))
        to = np.array([next(pages) for _ in range(size)], np.int32)
        to[1:][rng.random(size - 1) < 0.3] = -1
        parts.append((to, f"rows {n}"))
    put = []
    for targets, rows in zip(*put_order(kind, parts, most), strict=True):
        assert targets.shape in put_sizes(kind) and 0 < len(rows) <= max(most, 1)
        assert (targets[len(rows) :] == -1).all()
        for to, row in zip(targets, rows, strict=False):
            put += [(page, row, i) for i, page in enumerate(to)]
    put = [entry for entry in put if entry[0] >= 0]
    expected = [(page, row, i) for to, row in parts for i, page in enumerate(to) if page >= 0]
    assert sorted(put) == sorted(expected)


def test_many_whole_chunks_are_one_call() -> None:
    for kind in KV:
        chunks = [(np.arange(CHUNK_ROWS[-1]), None)] * PUTS[kind][-1]
        pages, rows = put_order(kind, chunks, 100)
        assert len(pages) == 1 and len(rows[0]) == PUTS[kind][-1]


def spy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine sends to its device from now on."""
    sent, runner = list[str](), engine.runner
    call, to_device, stage = runner.programs.call, runner.to_device, runner.stage

    def called(name: str, *args: Any) -> Any:
        sent.append(name)
        return call(name, *args)

    def transferred(kind: PageKind, chunks: list[Any]) -> Any:
        sent.extend([f"send-{kind}"] * len(chunks))
        return to_device(kind, chunks)

    def staged(inputs: Any) -> Any:
        sent.extend(["stage"] if jax.tree.leaves(inputs) else [])
        return stage(inputs)

    monkeypatch.setattr(runner.programs, "call", called)
    monkeypatch.setattr(runner, "stage", staged)
    monkeypatch.setattr(runner, "to_device", transferred)
    return sent


def trunk_on_host(engine: Engine, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 256, 250).tolist()
    run(engine, [request("trunk", trunk)])
    engine.cache.offload()
    engine.host.offload()
    return trunk


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(**SMALL_CHUNKS)


def test_a_hit_alone_is_one_step_and_what_it_waits_for_comes_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = trunk_on_host(engine, 0)
    prompt = [*trunk, 1, 2, 3]
    sent = spy(engine, monkeypatch)
    options = PrefixCacheOptions("tail-replay", 0.1)
    engine.add(request("hit", prompt, max_tokens=1, prefix_cache=options))
    engine.step()
    phases = [name for name, _ in itertools.groupby(sent)]
    assert phases == [
        *("send-inputs", "put-inputs", "stage", "send-lower-kv", "replay", "stage"),
        *("put-lower-kv", "send-upper-kv", "prefill-lower", "put-upper-kv", "send-states"),
        *("prefill-upper", "set_row", "draw-GREEDY", "put-states"),
    ]
    assert sent.count("send-lower-kv") == sent.count("send-upper-kv") > STEP_PARTS["lower-kv"]
    assert [len(update.token_ids) for update in engine.step()] == [1]
    assert_idle(engine)


def test_the_question_reads_kv_of_all_layers_when_it_has_arrived() -> None:
    """All in one step; what pages held before is wrong, and little of it shows in greedy text."""
    engine = tiny_engine(recovery="tail-replay", host_memory=2**22, max_prefill_tokens=512)
    trunk = trunk_on_host(engine, 5)
    caches = engine.runner.caches
    pools = caches.keys, caches.values
    keys, values = jax.tree.map(lambda pool: jnp.full_like(pool, 3.7), pools)
    engine.runner.caches = replace(caches, keys=keys, values=values)
    prompt = [*trunk, 1, 2, 3]
    engine.add(request("hit", prompt, max_tokens=1, logprobs=1, prefix_cache=HIT))
    engine.step()
    [update] = engine.step()
    rows = oracle_logits(prompt)[-1].astype(np.float64)
    expected = rows.max() - np.log(np.exp(rows - rows.max()).sum()) - rows.max()
    [found] = update.logprobs
    assert found.logprob == pytest.approx(expected, abs=1e-4)
    assert_idle(engine)


def test_a_state_that_came_last_is_a_checkpoint_again(engine: Engine) -> None:
    """The first hit replays and does not read it; the second one does."""
    trunk = trunk_on_host(engine, 1)
    for name, options in (("replays", HIT), ("reads", PrefixCacheOptions("dense"))):
        prompt = [*trunk, len(name), 7]
        result = run(engine, [request(name, prompt, max_tokens=3, prefix_cache=options)])[name]
        assert_greedy(prompt, result.token_ids)
    assert (result.usage.recovery, result.usage.restored_tokens) == ("dense", len(trunk) - 1)
    assert_idle(engine)


@pytest.mark.parametrize("recovery", ["tail-replay", "anchored", "dense"])
def test_beside_decodes_a_few_chunks_go_a_step_and_decodes_are_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, recovery: Any
) -> None:
    trunk = trunk_on_host(engine, 2)
    talking, prompt = trunk[::-1][:20], [*trunk, 1, 2, 3]
    engine.add(request("talking", talking, max_tokens=40))
    spoken = list[int]()
    while len(spoken) < 3:
        spoken += [t for update in engine.step() for t in update.token_ids]
    sent = spy(engine, monkeypatch)
    options = PrefixCacheOptions(recovery, 1.0)
    engine.add(request("hit", prompt, max_tokens=4, prefix_cache=options))
    steps, answer = 0, list[int]()
    while engine.has_work():
        sent.clear()
        for update in engine.step():
            (spoken if update.request_id == "talking" else answer).extend(update.token_ids)
        for kind, most in STEP_PARTS.items():
            assert sent.count(f"send-{kind}") <= most
        if any(name in ("send-lower-kv", "send-upper-kv") for name in sent):
            steps += 1
            assert [name for name in sent[:2] if name not in ("set_lines", "add_pages")][
                0
            ] == "decode"
    assert steps > 1
    assert_greedy(talking, spoken)
    assert_greedy(prompt, answer)
    assert_idle(engine)


def test_a_request_that_ends_before_all_was_sent_leaves_nothing(engine: Engine) -> None:
    trunk = trunk_on_host(engine, 3)
    engine.add(request("talking", trunk[::-1][:20], max_tokens=20))
    engine.step()
    engine.add(request("hit", [*trunk, 1], prefix_cache=HIT))
    engine.step()
    assert engine.host.arriving == 1
    engine.abort("hit")
    engine.step()
    assert engine.host.arriving == 0
    while engine.has_work():
        engine.step()
    assert_idle(engine)


def test_a_preempted_request_gets_its_kv_when_all_others_have_ended(engine: Engine) -> None:
    """It has generated tokens, and still nothing decodes: the rest of its KV must be sent."""
    trunk = trunk_on_host(engine, 4)
    prompt, options = trunk, PrefixCacheOptions("dense")
    engine.add(request("talking", trunk[::-1][:20], max_tokens=40))
    engine.step()
    engine.add(request("back", prompt, max_tokens=8, prefix_cache=options))
    answer = list[int]()

    def step() -> None:
        for update in engine.step():
            if update.request_id == "back":
                answer.extend(update.token_ids)

    while len(answer) < 3:
        step()
    back = engine.scheduler.running[-1]
    engine.scheduler._preempt(back)
    engine.cache.offload()
    while back not in engine.scheduler.running:
        step()
    assert engine.host.arriving == 1
    engine.abort("talking")
    for _ in range(20):
        step()
    assert not engine.has_work()
    assert_greedy(prompt, answer)
    assert_idle(engine)
