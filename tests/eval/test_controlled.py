"""Controlled runs on the bundled model: what they resume, what they mask, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.batch import DenseBatch
from jhybrid.engine.build import LoadedModel, load_model
from jhybrid.engine.config import EngineConfig
from jhybrid.eval.arms import parse_arm
from jhybrid.eval.controlled.device import Device
from jhybrid.eval.controlled.run import cut, layout_for, run_controlled
from jhybrid.eval.outcome import Outcome
from jhybrid.eval.tasks.problem import Encoder, Problem
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.models.hybrid import forward, logits
from jhybrid.models.specs import model_partition
from jhybrid.sharding import REPLICATED, sharded
from jhybrid.weights import load_hf_params
from tests.eval.test_protocol import _problem
from tests.golden_files import FOLDERS, name_of

ENGINE = EngineConfig(max_running=2, max_prefill_tokens=512)
ARMS = ("dense", "zero-full-kv", "mask-full-kv", "zero", "mask-both", "empty/16", "full/16", "off")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("demo", ENGINE)


@pytest.fixture(scope="module")
def problems(model: LoadedModel) -> list[Problem]:
    return [_problem(Encoder(model.tokenizer), n) for n in range(3)]


def run(
    model: LoadedModel, problems: list[Problem], folder: Path, arms: tuple[str, ...] = ARMS
) -> dict[str, dict[str, Outcome]]:
    encoder = Encoder(model.tokenizer)
    return run_controlled(model, ENGINE, encoder, [parse_arm(a) for a in arms], problems, folder)


@pytest.fixture(scope="module")
def found(
    model: LoadedModel, problems: list[Problem], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Outcome]], Path]:
    folder = tmp_path_factory.mktemp("controlled")
    return run(model, problems, folder), folder


def test_what_changes_nothing_is_dense(found: tuple[dict[str, dict[str, Outcome]], Path]):
    outcomes, _ = found
    for name, dense in outcomes["dense"].items():
        assert dense.score == 1 and dense.kl == 0 and dense.nll is not None
        assert outcomes["full/16"][name].nll == dense.nll
        assert outcomes["off"][name].kl == pytest.approx(0, abs=1e-6)
        assert outcomes["off"][name].records[0]["cached"] == 0
        kls = [outcomes[arm][name].kl for arm in ("zero", "empty/16", "zero-full-kv")]
        assert all(kl is not None and kl > 1e-4 for kl in kls)
    assert {o.score for o in outcomes["mask-both"].values()} == {0}


def test_a_masked_prefix_without_state_was_never_there(
    model: LoadedModel,
    problems: list[Problem],
    found: tuple[dict[str, dict[str, Outcome]], Path],
):
    for problem in problems:
        alone = _answer_nll(model, problem.prompt[problem.boundary :], problem.answer_ids)
        masked = found[0]["mask-both"][f"recall/{problem.id}"].nll
        assert masked == pytest.approx(alone, abs=1e-4)


@pytest.fixture(scope="module")
def kimi(model: LoadedModel) -> LoadedModel:
    """Random weights of a small Kimi-Linear: channels as units, latents in place of keys."""
    folder = {name_of(f): f for f in FOLDERS}["kimi_linear-query_low_rank"]
    config = model_config(read_hf_config(folder))
    params = load_hf_params(folder, config, model.mesh, jnp.float32)
    valid = min(config.vocab_size, 256)
    return replace(
        model, name="kimi", config=config, params=params, valid_vocab=valid, eos=frozenset()
    )


def test_channels_and_latents(kimi: LoadedModel, problems: list[Problem], tmp_path: Path):
    arms = ("dense", "off", "tail-replay/1", "zero", "mask-both", "full/4", "random-1234/4")
    found = run(kimi, problems[:1], tmp_path, arms)
    outcomes = {arm: found[arm]["recall/0"] for arm in arms}
    for arm in ("off", "tail-replay/1", "full/4"):
        assert outcomes[arm].kl == pytest.approx(0, abs=1e-5), arm
    assert all((outcomes[arm].kl or 0) > 1e-3 for arm in ("zero", "mask-both"))
    prompt = problems[0].prompt[problems[0].boundary :]
    alone = _answer_nll(kimi, prompt, problems[0].answer_ids)
    assert outcomes["mask-both"].nll == pytest.approx(alone, abs=1e-4)


def _answer_nll(model: LoadedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """By one pass over the whole, without any cache."""

    def scores(params, ids):
        hidden, _ = forward(params, None, DenseBatch(ids), model.config)
        return logits(params, hidden, model.config)

    ins = (model_partition(model.config), REPLICATED)
    ids = jnp.array([[*prompt, *answer]], jnp.int32)
    whole = jax.jit(sharded(scores, model.mesh, ins, REPLICATED))(model.params, ids)
    likely = jax.nn.log_softmax(whole[0, :, : model.valid_vocab])
    at = likely[len(prompt) - 1 : -1][np.arange(len(answer)), np.array(answer)]
    return -float(at.mean())


def test_a_killed_run_goes_on_where_it_was(
    model: LoadedModel,
    problems: list[Problem],
    found: tuple[dict[str, dict[str, Outcome]], Path],
    tmp_path: Path,
):
    outcomes, whole = found
    lines = (whole / "cells.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2 * len(ARMS)  # two blocks
    (tmp_path / "cells.jsonl").write_text("".join(lines[:11]) + lines[11][:40])
    assert run(model, problems, tmp_path) == outcomes
    after = (tmp_path / "cells.jsonl").read_text().splitlines(keepends=True)
    assert after[:11] == lines[:11] and sorted(after) == sorted(lines)
    run(model, problems, tmp_path)  # nothing is left to do
    assert (tmp_path / "cells.jsonl").read_text().splitlines(keepends=True) == after


def test_an_answer_ends_with_its_stop_string(
    model: LoadedModel, problems: list[Problem], tmp_path: Path
):
    stopped = [replace(p, stop=("2",)) for p in problems]  # within 48213 and 70921
    found = run(model, stopped, tmp_path, ("dense",))["dense"]
    assert [found[f"recall/{n}"].score for n in range(3)] == [0, 0, 1]


def test_a_stop_string_spans_tokens_and_is_each_problems_own(
    model: LoadedModel,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    steps, generate = [], Device.generate

    def counted(self: Device, *args: Any) -> np.ndarray:
        tokens = generate(self, *args)
        steps.append(tokens.shape[1])
        return tokens

    monkeypatch.setattr(Device, "generate", counted)
    stops = (("213", " 4821"), ("7092", "09"), ("x", "517"))  # 48213, 70921, 30517
    long = [replace(p, stop=s, max_tokens=40) for p, s in zip(problems, stops, strict=True)]
    run(model, long, tmp_path, ("dense",))
    cells = [json.loads(x) for x in (tmp_path / "cells.jsonl").read_text().splitlines()]
    # what is whole first ends the text, as in the engine; and nobody waits for 40 tokens
    assert [text for cell in cells for text in cell["texts"]] == ["", " 7", " 30"]
    assert steps == [8, 8]


def test_blocks_hold_problems_of_about_one_length(problems: list[Problem]):
    longer = [replace(p, id=f"long-{p.id}", prompt=p.prompt * 4) for p in problems]
    layout = layout_for([*problems, *longer], replace(ENGINE, max_prefill_tokens=4096))
    blocks = cut([*problems, *longer], layout)
    assert [len(b.problems) for b in blocks] == [2, 2, 2]
    assert all(p.id.startswith("long") for p in blocks[0].problems)


def test_what_cannot_run_is_refused(model: LoadedModel, problems: list[Problem], tmp_path: Path):
    encoder, dense = Encoder(model.tokenizer), [parse_arm("dense")]
    short = replace(ENGINE, max_prefill_tokens=64)
    with pytest.raises(ValueError, match="max_prefill_tokens"):
        run_controlled(model, short, encoder, dense, problems, tmp_path)
    with pytest.raises(ValueError, match="prefix"):
        run(model, [replace(problems[0], boundary=0)], tmp_path)
