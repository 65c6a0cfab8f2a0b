"""The offline API with the bundled model, and how an engine is sized and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid import LLM, SamplingParams
from jhybrid.engine.build import find_model
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.memory import PoolSizes, size_pools, split_states
from jhybrid.sharding import make_mesh

FLAGS: dict[str, Any] = {"max_running": 2, "max_prefill_tokens": 64, "max_context": 512}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", warm_up=False, **FLAGS) as llm:
        yield llm
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("after")


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 1, 5)]
    prompts = ["Once upon a time", [79, 110, 101], {"prompt_token_ids": [65, 66]}]
    outputs = llm.generate(prompts, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5]
    assert [o.prompt for o in outputs] == ["Once upon a time", None, None]
    assert outputs[0].prompt_token_ids == tuple(b"Once upon a time")
    for output in outputs:
        text = bytes(t for t in output.outputs[0].token_ids if t < 256).decode()
        assert output.outputs[0].text == text
        assert output.outputs[0].finish_reason == "length"
        assert output.prefix_cache is not None and output.prefix_cache.recovery == "dense"


def test_n_samples_differ_and_repeat_by_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    first, again = (llm.generate("The little boat", params)[0] for _ in range(2))
    texts = [o.text for o in first.outputs]
    assert len(set(texts)) > 1
    assert texts == [o.text for o in again.outputs]
    alone = llm.generate("The little boat", SamplingParams(max_tokens=12, seed=4, ignore_eos=True))
    assert alone[0].outputs[0].text == texts[1]  # the second of them has the seed after the first


def _failing(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, times: Any) -> None:
    """Those calls of a part of a step, counted from 1, raise after they did what they do."""
    owner = llm.engine if where == "_commit" else llm.engine.runner
    real, calls = getattr(owner, where), []

    def fails(*args: Any) -> Any:
        calls.append(where)
        if where == "_commit" and len(calls) in times:
            raise RuntimeError(f"{where} {len(calls)}")  # whose step is lost
        found = real(*args)
        if len(calls) in times:
            raise RuntimeError(f"{where} {len(calls)}")
        return found

    monkeypatch.setattr(owner, where, fails)


@pytest.mark.parametrize(
    ("where", "first"),
    [("_commit", 1), ("_commit", 3), ("decode", 2), ("draw", 1), ("draw", 2), ("prefill", 1)],
)
def test_a_step_that_fails_leaves_nothing_wrong(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, first: int
) -> None:
    """It is what is told, not what ends its requests; what comes later is right, hit or not."""
    prompt, engine = "Once upon a time there was a red boat. " * 3, llm.engine
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.flush_cache()
    right = llm.generate(prompt, params)[0]
    engine.flush_cache()
    with monkeypatch.context() as patch:
        _failing(llm, patch, where, range(first, 99))
        with pytest.raises(RuntimeError, match=f"^{where} {first}$"):
            llm.generate([prompt, prompt[:40]], params)
    assert not engine.has_work()
    engine.cache.check_integrity()
    answer = right.outputs[0].token_ids
    for known in (0, 1, 4):
        again = SamplingParams(max_tokens=20 - known, temperature=0, ignore_eos=True)
        found = llm.generate([[*right.prompt_token_ids, *answer[:known]]], again)[0]
        assert found.outputs[0].token_ids == answer[known:]


def test_prompts_are_text_or_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    found = llm.generate(prompt_token_ids=[[79, 110]], sampling_params=params)
    assert found[0].prompt_token_ids == (79, 110)
    with pytest.raises(ValueError, match="prompts.*prompt_token_ids"):
        llm.generate(sampling_params=params)


def test_bfloat16_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="dtype.*float32 on a CPU.*bfloat16"):
        LLM("demo", dtype="bfloat16", **FLAGS)


def test_chat_recalls_what_it_was_told(llm: LLM) -> None:
    told = "The number of the green lamp is 30517. What is the number of the green lamp?"
    conversation = [{"role": "user", "content": told}]
    output = llm.chat(conversation, SamplingParams(max_tokens=60, temperature=0))[0]
    assert "30517" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    both = llm.chat([conversation, conversation], SamplingParams(max_tokens=60, temperature=0))
    assert [o.outputs[0].text for o in both] == [output.outputs[0].text] * 2


def test_logprobs_come_one_a_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1)
    output = llm.generate("Once upon", params)[0]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and [len(item.top) for item in logprobs] == [2] * 4
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len("Once upon")


@pytest.mark.parametrize("prompt", [[79, 110], np.array([79, 110]), [np.int64(79), np.int64(110)]])
def test_ids_alone_are_one_prompt(llm: LLM, prompt: Any) -> None:
    output = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    assert [o.prompt_token_ids for o in output] == [(79, 110)]


@pytest.mark.parametrize("prompt", [[1.5, 2], [2, None], [[2, "7"]], np.array([1.5, 2.0])])
def test_a_prompt_of_no_ids_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt: expected token ids of 64 bits, got"):
        llm.generate(prompt)


def test_wrong_prompts_leave_nothing_running(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(["fine", [100000]], SamplingParams(max_tokens=30))
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["one", "two"], [SamplingParams()])
    assert not llm.engine.has_work()
    assert llm.engine.metrics().pools["native_slots"]["running"] == 0


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"kv_memory": 1024}, "kv_memory"),
        ({"state_memory": 1024}, "state_memory"),
        ({"max_context": 10**6}, "max_context"),
        ({"recovery": "best"}, "recovery"),
        ({"tp": 3}, "tp"),
        ({"page_size": 0}, "page_size"),
        ({"dtype": "float16"}, "dtype"),
        ({"w_max": 3}, "w_max"),
        ({"recovery": "dasc-nr", "checkpoint_dtype": "int4"}, "checkpoint_dtype"),
        ({"recovery": "dasc-nr", "layout": "padded", "placement": "storage"}, "layout"),
        ({"recovery": "dasc-wr", "native_slots": 10, "state_memory": 2**20}, "state_memory"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(flags: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        LLM("demo", **flags)


@pytest.mark.parametrize("name", ["nowhere", "dummy:gpt-5"])
def test_unknown_models_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="model|dummy"):
        find_model(name)


def test_memory_flags_buy_pages_and_slots() -> None:
    config, mesh = find_model("demo").config, make_mesh(1)
    page = 2 * 2 * 16 * 2 * 64 * 4  # keys and values, 2 layers, 16 tokens, 2 heads x 64, float32
    slot = 6 * (8 * 64 * 32 + 3 * 4 * (64 + 64 + 2 * 32)) * 4  # states and conv windows
    engine = EngineConfig(kv_memory=100 * page + 1, state_memory=10 * slot, max_context=1024)
    assert size_pools(config, engine, mesh, jnp.float32, 1024) == PoolSizes(100, 10)


def test_one_budget_buys_native_and_compressed_slots() -> None:
    engine = EngineConfig(
        recovery="dasc-nr", max_running=4, max_prefill_tokens=256, checkpoint_interval=128
    )
    assert engine.w_max == 16 and "dasc-wr" in engine.recoveries
    # four to run, and those of a step: two on the grid and four at the ends of prompts
    assert split_states(engine, 1000, 10, 4, 0, 7) == PoolSizes(7, 10, 225, 6)
    assert split_states(engine, 1000, 10, 4, 101, 7) == PoolSizes(7, 10, 199, 6)
    assert split_states(engine, 50, 10, 4, 0, 7) == PoolSizes(7, 2, 7, 1)
    given = replace(engine, native_slots=30)
    assert split_states(given, 1000, 10, 4, 0, 7) == PoolSizes(7, 30, 175, 6)
    for sizes in (split_states(engine, budget, 10, 3, 0, 7) for budget in range(13, 2000, 7)):
        assert sizes.watermark < sizes.native_slots and sizes.compressed_slots >= 1
    with pytest.raises(ValueError, match="^state_memory: expected at least 34 bytes"):
        split_states(engine, 33, 10, 4, 20, 7)


def test_a_compressed_server_tells_its_plan_and_stays_within_its_budget() -> None:
    budget = 8 * 2**20
    flags: dict[str, Any] = {**FLAGS, "recovery": "dasc-wr", "w_max": 64, "state_memory": budget}
    with LLM("demo", warm_up=False, checkpoint_dtype="int8", **flags) as llm:
        told = "The number of the green lamp is 30517. What is the number of the green lamp?"
        params = SamplingParams(max_tokens=60, temperature=0)
        outputs = [llm.chat([{"role": "user", "content": told}], params)[0] for _ in range(2)]
        assert all("30517" in output.outputs[0].text for output in outputs)
        cold, warm = (output.prefix_cache for output in outputs)
        assert cold is not None and cold.restored_tokens == 0
        assert warm is not None and warm.recovery == "dasc-wr"
        assert warm.restored_tokens > 0 and warm.replayed_tokens > 0
        info = llm.engine.info()
        json.dumps(info, allow_nan=False)
    pools = info["pools"]
    scratch = info["plan"]["scratch_bytes"]
    used = pools["native_slots"]["bytes"] + pools["compressed_slots"]["bytes"] + scratch
    one = pools["compressed_slots"]["bytes"] // pools["compressed_slots"]["total"]
    assert budget - one < used <= budget
    assert (info["w_max"], info["recovery"], info["checkpoint_dtype"]) == (64, "dasc-wr", "int8")
    assert one == info["plan"]["slot_bytes"]
    assert info["plan"]["kept"] == 31 and info["plan"]["units"] == 48
