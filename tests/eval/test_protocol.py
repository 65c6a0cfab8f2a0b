"""The warmup-replay protocol on the bundled model: what is hit, kept, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid import LLM, PrefixCacheOptions, SamplingParams
from jhybrid.engine.programs import CPU_OPTIONS
from jhybrid.eval.arms import parse_arm
from jhybrid.eval.interventions import control_plan, mask_states, zero_full_kv, zero_linear
from jhybrid.eval.protocol import ArmRun, Protocol, Residency, pooled_hit
from jhybrid.eval.store import Store
from jhybrid.eval.tasks.problem import Draft, Encoder, Problem
from jhybrid.retention.horizon import static_horizons

FLAGS: dict[str, Any] = {"max_running": 2, "max_prefill_tokens": 64, "max_context": 512}
SMALL = Protocol(replays=2, probe=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        # Here programs run more often than they are compiled.
        patch.setitem(CPU_OPTIONS, "xla_backend_optimization_level", 1)
        with LLM("demo", warm_up=False, **FLAGS) as llm:
            yield llm


@pytest.fixture(scope="module")
def problems(llm: LLM) -> list[Problem]:
    encoder = Encoder(llm.get_tokenizer())
    return [_problem(encoder, n) for n in range(3)]


def _problem(encoder: Encoder, number: int) -> Problem:
    animal, value = (("fox", "48213"), ("cat", "70921"), ("dog", "30517"))[number]
    filler = "The old house stood at the end of the road. " * (number + 1)
    context = f"{filler}The number of the red {animal} is {value}. {filler}\n"
    question, prefix = f"What is the number of the red {animal}? ", "The number is"
    answer = f" {value}."
    draft = Draft(str(number), context, question, prefix, (value,), "string_match_all", 8, answer)
    return encoder.freeze(draft, "recall")


def run_of(llm: LLM, arm: str, folder: Path, protocol: Protocol = SMALL) -> ArmRun:
    stores = Store(folder, "outputs"), Store(folder, "probes")
    return ArmRun(llm, parse_arm(arm), "test", protocol, *stores, {"model": "demo"})


def test_every_replay_hits_the_prefix_and_counts(llm: LLM, problems: list[Problem], tmp_path: Path):
    run = run_of(llm, "dense", tmp_path)
    run.run(problems)
    for problem in problems:
        first, second = run.records(problem)
        assert (first["restored"], first["cached"]) == (problem.boundary, problem.boundary)
        assert first["cached"] + first["new"] == len(problem.prompt)
        assert second["restored"] == problem.boundary  # not what the first replay has left
        assert first["text"] == second["text"] and first["score"] == 1
        probe = run.probe(problem)
        assert probe is not None
        suffix = len(problem.prompt) - problem.boundary
        assert [bool(row) for row in probe["suffix"]] == [False] + [True] * (suffix - 1)
        assert len(probe["answer"]) == len(problem.answer_ids) and all(probe["answer"])
    records = [r for p in problems for r in run.records(p)]
    cached, new = (sum(r[k] for r in records) for k in ("cached", "new"))
    assert pooled_hit(records) == cached / (cached + new) > 0.8


def test_a_prompt_cached_whole_is_warmed_once(llm: LLM, problems: list[Problem], tmp_path: Path):
    whole = [replace(p, boundary=len(p.prompt) - 1) for p in problems]
    asked = llm.engine.metrics().prompt_tokens
    run = run_of(llm, "dense", tmp_path, Protocol(replays=3, probe=False))
    run.run(whole)
    sizes = [len(p.prompt) for p in whole]
    assert llm.engine.metrics().prompt_tokens - asked == sum(4 * n - 1 for n in sizes)
    for problem in whole:
        assert [r["restored"] for r in run.records(problem)] == [len(problem.prompt) - 1] * 3


def test_a_killed_run_goes_on_where_it_was(llm: LLM, problems: list[Problem], tmp_path: Path):
    whole, partly = tmp_path / "whole", tmp_path / "partly"
    protocol = replace(SMALL, probe=False)
    reference = run_of(llm, "dense", whole, protocol)
    reference.run(problems)
    lines = (whole / "outputs.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 6
    partly.mkdir()
    (partly / "outputs.jsonl").write_text("".join(lines[:2]) + lines[2][:40])  # killed in a write
    resumed = run_of(llm, "dense", partly, protocol)
    resumed.run(problems)
    after = (partly / "outputs.jsonl").read_text().splitlines(keepends=True)
    assert after[:2] == lines[:2] and len(after) == 6
    for problem in problems:
        own, other = ([r["text"] for r in x.records(problem)] for x in (resumed, reference))
        assert own == other
    run_of(llm, "dense", partly, protocol).run(problems)  # nothing is left to do
    assert (partly / "outputs.jsonl").read_text().splitlines(keepends=True) == after
    other_seed = run_of(llm, "dense", partly, replace(protocol, seed=1))
    assert other_seed.key(problems[0], 1) not in other_seed.outputs  # other settings, other key


def test_a_run_of_other_weights_takes_nothing_over(
    llm: LLM, problems: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    protocol = Protocol(probe=False)
    run_of(llm, "dense", tmp_path, protocol).run(problems[:1])
    again = run_of(llm, "dense", tmp_path, protocol)
    assert again.key(problems[0], 1) in again.outputs
    params = llm.engine.runner.params
    norm = params.norm * 1.001
    monkeypatch.setattr(llm.engine.runner, "params", replace(params, norm=norm))
    other = run_of(llm, "dense", tmp_path, protocol)
    assert other.key(problems[0], 1) not in other.outputs


def test_sampling_is_repeatable_and_paired(llm: LLM, problems: list[Problem], tmp_path: Path):
    protocol = Protocol(replays=2, temperature=1.5, probe=False)
    texts = []
    for name in ("a", "b"):
        run = run_of(llm, "dense", tmp_path / name, protocol)
        run.run(problems[:1])
        texts.append([r["text"] for r in run.records(problems[0])])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]  # replays have seeds of their own


def test_interventions_change_what_is_reused_and_nothing_else(
    llm: LLM, problems: list[Problem], tmp_path: Path
):
    scores = {}
    for arm in ("baseline", "zero-full-kv", "zero-linear", "zero-both"):
        run = run_of(llm, arm, tmp_path, Protocol(probe=False))
        run.run(problems)
        records = [run.records(p)[0] for p in problems]
        assert [r["restored"] for r in records] == [p.boundary for p in problems]
        scores[arm] = [r["score"] for r in records]
    assert scores["baseline"] == [1, 1, 1]
    # in so short a context the states keep a number now and then
    assert scores["zero-both"] == [0, 0, 0] and sum(scores["zero-full-kv"]) < 3


def test_a_full_mask_is_dense_and_an_empty_one_is_not(
    llm: LLM, problems: list[Problem], tmp_path: Path
):
    probes = {}
    for arm in ("dense", "full/16", "random-1234/64", "empty/16"):
        run = run_of(llm, arm, tmp_path, Protocol())
        run.run(problems[:1])
        found = run.probe(problems[0])
        assert found is not None
        probes[arm] = found["suffix"], found["answer"]
    assert probes["full/16"] == probes["dense"]
    assert probes["random-1234/64"] != probes["dense"] != probes["empty/16"]


def test_zeroing_and_masks_are_what_they_say(llm: LLM):
    runner = llm.engine.runner
    caches: Any = runner.caches.replace(  # pyright: ignore[reportAttributeAccessIssue]
        **{
            name: jnp.ones_like(getattr(runner.caches, name)[:1])
            for name in ("keys", "values", "recurrent", "conv")
        }
    )
    for fn, zeroed in ((zero_full_kv, ("keys", "values")), (zero_linear, ("recurrent", "conv"))):
        after = fn(caches)
        for name in ("keys", "values", "recurrent", "conv"):
            assert float(getattr(after, name).max()) == (0 if name in zeroed else 1)
    horizons = static_horizons(runner.params, runner.config)
    plans = {n: control_plan(horizons, n) for n in ("random-1/64", "random-2/64", "inverse/64")}
    kept = {n: p.kept_per_layer.tolist() for n, p in plans.items()}
    assert kept["random-1/64"] == kept["random-2/64"] == kept["inverse/64"]
    assert not np.array_equal(plans["random-1/64"].keep, plans["random-2/64"].keep)
    rows = plans["inverse/64"].row_mask
    masked = mask_states(caches, rows).recurrent[0]
    assert np.array_equal(np.asarray(masked) == 1, np.broadcast_to(rows[..., None], masked.shape))


def test_blocks_never_need_more_than_the_pools_hold(
    llm: LLM, problems: list[Problem], tmp_path: Path
):
    run = run_of(llm, "dense", tmp_path, Protocol(probe=False))
    many = [replace(problems[0], id=str(n)) for n in range(2000)]
    blocks = list(run._blocks(many))
    pools = llm.engine.metrics().pools
    most = sum(pools["native_slots"].values()) // 3
    assert sum(map(len, blocks)) == 2000 and all(0 < len(b) <= most for b in blocks)
    run.protocol = replace(run.protocol, block=2)
    assert [len(b) for b in run._blocks(problems)] == [2, 1]


def test_residency_is_demanded(llm: LLM, problems: list[Problem], tmp_path: Path):
    good = Residency(free_slots=1, token_hit=0.5)
    run_of(llm, "dense", tmp_path / "a", Protocol(residency=good, probe=False)).run(problems)
    for demand, message in (
        (Residency(free_slots=10**6), "free slots"),
        (Residency(free_slots=1, token_hit=0.999), "hit"),
    ):
        run = run_of(llm, "dense", tmp_path / message, Protocol(residency=demand, probe=False))
        with pytest.raises(ValueError, match=message):
            run.run(problems)
    run = run_of(llm, "off", tmp_path / "off", Protocol(residency=good, probe=False))
    with pytest.raises(ValueError, match="hit"):
        run.run(problems)


def test_scores_behind_a_hit_are_those_of_a_whole_run(llm: LLM, problems: list[Problem]):
    """What a request that names its recovery is told of its prompt."""
    problem = problems[2]
    prompt = [*problem.prompt, *problem.answer_ids]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=5)
    assert llm.engine.flush_cache()
    whole = llm.generate([prompt], params)[0].prompt_logprobs
    hit = llm.generate([prompt], params, prefix_cache=PrefixCacheOptions("dense"))[0]
    assert whole is not None and hit.prompt_logprobs is not None and hit.prefix_cache is not None
    start = hit.prefix_cache.restored_tokens
    assert start > 0 and whole[0] is None and None not in whole[1:]
    assert hit.prompt_logprobs[: start + 1] == (None,) * (start + 1)
    for a, b in zip(whole[start + 1 :], hit.prompt_logprobs[start + 1 :], strict=True):
        assert a is not None and b is not None
        assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-4))


def test_a_store_refuses_what_is_no_record(tmp_path: Path):
    store = Store(tmp_path, "x")
    store.append("k", {"value": 1})
    store.append("k", {"value": 2})
    assert Store(tmp_path, "x")["k"]["value"] == 1
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 1
    (tmp_path / "x.jsonl").write_text(json.dumps({"no": "key"}) + "\n")
    with pytest.raises(ValueError, match="x.jsonl:1"):
        Store(tmp_path, "x")
