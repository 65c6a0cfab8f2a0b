"""What a step's programs take from the host is handed over before what they would wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from jhybrid.engine.engine import Engine
from jhybrid.engine.programs import PREFILL
from jhybrid.engine.request import PrefixCacheOptions, Request
from jhybrid.engine.warm_up import warm_up

from .tiny import request, run, tiny_engine

ASKS_ALL: dict[str, Any] = {"repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 2}
REPLAY = PrefixCacheOptions("tail-replay", 0.1)
ON_HOST: dict[str, Any] = {"recovery": "tail-replay", "host_memory": 400 * 2**10}
COMPRESSED: dict[str, Any] = {"recovery": "dasc-nr", "w_max": 32, "max_running": 2}


@dataclass(frozen=True)
class Sent:
    name: str  # of a program, or "stage" or "send-kind": what is small, and what is large
    from_host: int  # arrays that are handed over with it


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """All that an engine sends to its device from now on, as a list that grows."""

    def on(engine: Engine) -> list[Sent]:
        runner, sent = engine.runner, list[Sent]()
        call, stage, to_device = runner.programs.call, runner.stage, runner.to_device

        def called(name: str, size: Any, *args: Any) -> Any:
            sent.append(Sent(name, host_arrays(args)))
            return call(name, size, *args)

        def staged(inputs: Any) -> Any:
            if jax.tree.leaves(inputs):
                sent.append(Sent("stage", host_arrays(inputs)))
            return stage(inputs)

        def transferred(kind: Any, chunks: list[Any]) -> Any:
            if chunks:
                sent.append(Sent(f"send-{kind}", len(chunks)))
            return to_device(kind, chunks)

        monkeypatch.setattr(runner.programs, "call", called)
        monkeypatch.setattr(runner, "stage", staged)
        monkeypatch.setattr(runner, "to_device", transferred)
        return sent

    return on


def host_arrays(tree: Any) -> int:
    return sum(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


def assert_staged_first(sent: list[Sent]) -> set[str]:
    """What replays take is handed over before KV, what the question takes behind them; programs
    that move pages and states before bring their own, in one array or two. Which programs ran."""
    names = [item.name for item in sent]
    stages = [at for at, name in enumerate(names) if name == "stage"]
    assert len(stages) == 1 + ("replay" in names)
    if "replay" in names:
        assert stages[0] < names.index("replay") < stages[1]
        assert not any(name.endswith("-kv") for name in names[: stages[0]])
    own = {"copy_pages": 1, "put-inputs": 1, "put-states": 1, "load_states-zero": 2}
    programs = set[str]()
    for at, item in enumerate(sent):
        if item.name != "stage" and not item.name.startswith("send-"):
            name = item.name.rstrip("-0123456789")
            assert item.from_host == (own.get(name, 0) if at < stages[-1] else 0), item
            programs.add(name)
    return programs


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 256, length)]


def prepared(engine: Engine, *, offload: bool) -> list[int]:
    """A prompt that is cached on the device, or in host memory."""
    trunk = random_prompt(np.random.default_rng(0), 250)
    run(engine, [request("trunk", trunk)])
    if offload:
        engine.cache.offload()
        engine.host.offload()
    return trunk


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
        engine.cache.check_integrity()


HITS = {
    "host": ({"replay", "put-lower-kv", "put-upper-kv", "put-inputs"}, True),
    "device": ({"replay", "copy_pages"}, False),
}


@pytest.mark.parametrize(("wanted", "offload"), HITS.values(), ids=HITS)
def test_a_hit_alone_takes_all_from_the_host_before_it_begins(
    wanted: set[str], offload: bool, watch: Any
) -> None:
    engine = tiny_engine(**ON_HOST)
    trunk = prepared(engine, offload=offload)
    sent = watch(engine)
    prompt = [*trunk[:247], 1, 2, 3]
    engine.add(request("hit", prompt, prefix_cache=REPLAY, **ASKS_ALL))
    engine.step()
    always = {*PREFILL, "set_row", "set_seen", "draw-FULL", "prompt_logprobs"}
    assert assert_staged_first(sent) >= wanted | always
    finish(engine)


@pytest.mark.parametrize("recovery", ["dasc-nr", "dasc-wr"])
def test_restored_checkpoints_too(recovery: Any, watch: Any) -> None:
    engine = tiny_engine(**COMPRESSED, slots=4, compressed_slots=12, watermark=1)
    trunk = prepared(engine, offload=False)
    engine.scheduler.replay_window = 20
    sent, names = watch(engine), set[str]()
    options = PrefixCacheOptions(recovery)
    engine.add(request("hit", [*trunk, 1, 2], max_tokens=1, prefix_cache=options))
    while not names.issuperset(PREFILL) or engine.scheduler.running[0].prefilling:
        sent.clear()
        engine.step()
        names |= assert_staged_first([item for item in sent if item.name != "store_states"])
    assert ("load_states-zero" if recovery == "dasc-nr" else "load_states-keep") in names
    finish(engine)


def test_decodes_are_sent_before_it_and_alone_stage_nothing(watch: Any) -> None:
    engine = tiny_engine(**ON_HOST)
    trunk = prepared(engine, offload=True)
    engine.add(request("talking", trunk[::-1][:20], max_tokens=40))
    engine.step()
    sent = watch(engine)
    engine.step()
    assert [item.name for item in sent] == ["set_lines", "decode", "draw-GREEDY"]
    assert [item.from_host for item in sent[1:]] == [0, 0]
    sent.clear()
    engine.add(request("hit", [*trunk, 1, 2, 3], max_tokens=4, prefix_cache=REPLAY))
    engine.step()
    names = [item.name for item in sent]
    assert names[:2] == ["decode", "draw-GREEDY"]
    assert assert_staged_first(sent[2:]) >= {"put-inputs", "replay", "set_row"}
    finish(engine)


@pytest.mark.parametrize("flags", [ON_HOST, COMPRESSED], ids=["host", "compressed"])
@pytest.mark.parametrize("tp", [1, 2])
def test_executables_of_the_warm_up_take_what_is_staged(
    flags: dict[str, Any], tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: Any = {"max_running": 2, "max_prefill_tokens": 32, "slots": 8}
    engine = tiny_engine(**flags | sizes, tp=tp, own_programs=True)
    for _ in warm_up(engine.runner):
        pass
    before = engine.runner.programs.compilations()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        trunk = prepared(engine, offload="host_memory" in flags)
        run(engine, hits(trunk, engine.config.recovery))
    assert [r.message for r in caplog.records if "ompil" in r.message] == []
    assert engine.runner.programs.compilations() == before


def hits(trunk: list[int], recovery: Any) -> list[Request]:
    options = PrefixCacheOptions(recovery)
    return [
        request(f"h{cut}", [*trunk[:cut], cut, 1], prefix_cache=options, **ASKS_ALL)
        for cut in (50, 131, 247)
    ]
