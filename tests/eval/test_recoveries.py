"""The recoveries under the protocol: what each is measured on, against masks and exact runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jhybrid import LLM
from jhybrid.engine.build import load_model
from jhybrid.engine.config import EngineConfig
from jhybrid.eval.arms import Arm, engine_flags, parse_arm
from jhybrid.eval.controlled.run import run_controlled
from jhybrid.eval.probes import answer_nll, suffix_kl
from jhybrid.eval.protocol import ArmRun, Protocol
from jhybrid.eval.store import Record, Store
from jhybrid.eval.tasks.problem import Encoder, Problem
from tests.eval.test_protocol import FLAGS, _problem

ARMS = (
    "dense",
    "horizon/64",
    "dasc-nr/64",
    "dasc-nr/64/int8",
    "dasc-wr/64",
    "tail-replay/1",
    "tail-replay/0.1",
    "anchored",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Record, Record]]:
    """The probe and the first replay's record of one problem under every arm."""
    folder = tmp_path_factory.mktemp("runs")
    stores = Store(folder, "outputs"), Store(folder, "probes")
    found = {}
    for config, arms in _engines().items():
        with LLM("demo", warm_up=False, **vars(config)) as llm:
            problem: Problem = _problem(Encoder(llm.get_tokenizer()), 2)
            for arm in arms:
                run = ArmRun(llm, arm, "test", Protocol(), *stores, {})
                run.run([problem])
                probe = run.probe(problem)
                assert probe is not None
                found[arm.name] = probe, run.records(problem)[0]
    return found


def _engines() -> dict[EngineConfig, list[Arm]]:
    """Arms that can share an engine, by its configuration."""
    common = EngineConfig(**FLAGS, state_memory=16 * 2**20, kv_memory=8 * 2**20)
    engines: dict[EngineConfig, list[Arm]] = {}
    for arm in map(parse_arm, ARMS):
        engines.setdefault(engine_flags(arm, vars(common)), []).append(arm)
    return engines


def kl(runs: dict[str, tuple[Record, Record]], name: str) -> float:
    values = suffix_kl(runs["dense"][0], runs[name][0])
    assert len(values) > 10
    return sum(values) / len(values)


def test_every_arm_gets_the_recovery_it_asks_for(runs: dict[str, tuple[Record, Record]]):
    for name, (_, record) in runs.items():
        assert record["recovery"] == record["asked"], (name, record)
        # tail-replay and anchored match no deeper than where the others restore
        assert record["cached"] == runs["dense"][1]["cached"] > 100, (name, record)
    assert runs["dasc-wr/64"][1]["replayed"] == 64
    assert runs["tail-replay/0.1"][1]["replayed"] == -(-runs["dense"][1]["matched"] // 10)


def test_dasc_nr_is_the_horizons_mask_on_a_dense_checkpoint(
    runs: dict[str, tuple[Record, Record]],
):
    exact, engine = runs["horizon/64"][0], runs["dasc-nr/64"][0]
    assert max(suffix_kl(exact, engine)) < 1e-9
    assert 1e-6 < kl(runs, "dasc-nr/64") < 1e-2
    assert 1e-6 < kl(runs, "dasc-nr/64/int8") < 1e-2


def test_replaying_everything_is_dense_and_less_is_not(runs: dict[str, tuple[Record, Record]]):
    assert kl(runs, "tail-replay/1") < 1e-6
    assert kl(runs, "anchored") < 1e-6
    assert kl(runs, "tail-replay/0.1") > 1e-5
    assert kl(runs, "dasc-wr/64") < kl(runs, "dasc-nr/64")


def test_controlled_runs_find_what_the_engine_does(
    runs: dict[str, tuple[Record, Record]], tmp_path: Path
):
    engine = EngineConfig(max_running=2, max_prefill_tokens=512)
    model = load_model("demo", engine)
    encoder = Encoder(model.tokenizer)
    problem, arms = _problem(encoder, 2), [parse_arm(name) for name in ARMS]
    found = run_controlled(model, engine, encoder, arms, [problem], tmp_path)
    for name, (probe, record) in runs.items():
        own = found[name]["recall/2"]
        assert own.score == record["score"], name
        assert own.records[0]["replayed"] == record["replayed"], name
        assert own.nll == pytest.approx(answer_nll(probe), abs=1e-3), name
        # a lower bound, and 1 less a sum of float32 probabilities rounds at some 1e-6: the engine
        # tells the best 20 tokens of a position only
        theirs = suffix_kl(runs["dense"][0], probe)
        for position, value in own.kl_at.items():
            assert 0.8 * value - 5e-6 < theirs[position - 1] < 1.02 * value + 5e-6, name
