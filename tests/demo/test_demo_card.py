"""The card, the evaluation behind it, and the bundled models beside theirs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jhybrid.demo import MODELS, card, complete, evaluate
from jhybrid.demo.clock import Clock
from jhybrid.demo.export import write_model
from jhybrid.demo.model import logits_fn, static_horizons
from jhybrid.demo.presets import PRESETS, Preset
from jhybrid.demo.score import ARMS, THRESHOLDS, make_sheet, score
from jhybrid.demo.trials import PROMPTS, SKILLS, TRIALS
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.sharding import make_mesh
from jhybrid.weights import load_hf_params

VT_LINE = "| vt | 1024 | 1.0 | 0.9 | 0.0 | 0.9 |"


def test_card_is_written_from_the_log(preset: Preset, tmp_path: Path) -> None:
    """Whole, and as far as it goes when the time ran out."""
    start = {"kind": "start", "preset": "tiny", "seed": 0, "device": "cpu", "jax": "0"}
    start |= {"parameters": 1_000_000, "trial_bytes": [1000, 2000], "scored": 40}
    step = {"kind": "step", "phase": "128", "step": 10, "tokens": 5_000_000, "seconds": 3.0}
    log = [start, step | {"loss": {"recall": 0.5}}]
    text = card.card(preset.architecture.hf_config(), log)
    assert text.count(card.MISSING) >= 4
    assert "5 M bytes in 10 steps and 3 seconds on cpu" in text and "goes" not in text
    more = [start, step | {"phase": "refined", "step": 30, "seconds": 4.0, "loss": {"recall": 0.2}}]
    text = card.card(preset.architecture.hf_config(), log + more)
    assert "10 M bytes in 40 steps and 7 seconds on cpu" in text and "In 2 goes" in text
    assert "| 128 | 10 | 5.0 | 3 | recall 0.50 |\n| refined | 30 | 5.0 | 4 | recall 0.20 |" in text

    arms = {"all": 1.0, "without states": 0.9, "without keys": 0.0}
    parts = {
        "benchmark": {"scores": {"vt": {"1024": arms}}, "failures": ["vt/2048: missed"]},
        "initial_horizons": {"0": [4.0, 90.0]},
        "recall_one_number": {"trials": 100, "passed": 97, "failures": []},
        "horizons": {
            "static": {"0": [5.0, 80.0]},
            "on_text": [{"mean": [4.0, 70.0], "slow": [9.0, 99.0], "fast": [2.0, 50.0]}],
        },
        "skills": {"copying": {"answers": 7, "exact": 0.5}},
        "held_out_nats_per_byte": {"fiction": 1.25},
        "samples": [{"user": "Hi", "start": "", "reply": "Hello!", "copied": None}],
    }
    log += [{"kind": "evaluation", name: value} for name, value in parts.items()]
    (tmp_path / "config.json").write_text(json.dumps(preset.architecture.hf_config()))
    (tmp_path / "train_log.jsonl").write_text("\n".join(json.dumps(r) for r in log))
    card.write_card(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert card.MISSING not in text
    for shown in (
        "| one_number | 97 | 100 |",
        "| 0 | 4, 90 | 5, 80 |",
        "> Hello!",
        "(LF:",
        VT_LINE,
    ):
        assert shown in text


@pytest.mark.parametrize("name", sorted(MODELS))
def test_bundled_models_do_what_their_cards_say(name: str, tmp_path: Path) -> None:
    folder, mesh = MODELS[name], make_mesh(1)
    config = model_config(read_hf_config(folder))
    log = [json.loads(x) for x in (folder / "train_log.jsonl").read_text().splitlines()]
    assert (folder / "README.md").read_text() == card.card(read_hf_config(folder), log)
    assert (folder / "model.safetensors").stat().st_size < 12e6
    params = load_hf_params(folder, config, mesh, jnp.float32)
    tasks = ("niah_single_1", "vt", "last_write")
    sheets = {(task, 600): make_sheet(tmp_path, task, 600, 8) for task in tasks}
    run = logits_fn(config, mesh, jnp.float32)
    for task, _, arms in score(run, params, sheets):
        assert arms["all"] >= THRESHOLDS[task], task
        if task == "niah_single_1":
            assert arms["without states"] >= 0.9 and arms["without keys"] <= 0.2


def test_complete_measures_what_the_log_has_not(
    preset: Preset, params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation's tasks too: without problems nothing was missed, and nothing measured."""
    few = dataclasses.replace(preset, trials=2, sample_bytes=4, scored=1, scored_lengths=(512,))
    monkeypatch.setitem(PRESETS, "few", few)
    monkeypatch.setattr("jhybrid.demo.complete.THRESHOLDS", {"vt": 0.9, "last_write": 0.9})
    story = "A cat sat on a mat. It saw a big dog. They ran away to the park and slept. " * 20
    for name in ("fiction", "essays", "tinystories"):
        (tmp_path / f"{name}.txt").write_text(story)
    write_model(tmp_path, params, preset.architecture.hf_config())
    start = {"kind": "start", "preset": "few", "seed": 0, "device": "cpu", "jax": "0"}
    start |= {"parameters": 1_000_000, "trial_bytes": [1000, 2000], "scored": 1}
    step = {"kind": "step", "phase": "128", "step": 10, "tokens": 5_000_000, "seconds": 3.0}
    known = {"trials": 100, "passed": 97, "failures": []}
    log = [start, step | {"loss": {"recall": 0.5}}]
    log += [{"kind": "evaluation", "initial_horizons": static_horizons(params)}]
    log += [{"kind": "evaluation", f"recall_{name}": known, "seconds": 9.5} for name in TRIALS]
    log += [{"kind": "evaluation", "horizons": card.MISSING}]
    log += [{"kind": "evaluation", "skills": "failed: ValueError()"}]
    path = tmp_path / "train_log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in log))
    complete.main([str(tmp_path), "--corpus", str(tmp_path)])
    added = [json.loads(line) for line in path.read_text().splitlines()][len(log) :]
    found = {name: value for r in added for name, value in r.items() if name not in ("kind",)}
    assert set(found) - {"device"} == {
        *("benchmark", "held_out_nats_per_byte", "horizons", "samples", "skills"),
    }
    assert set(found["benchmark"]["scores"]) == {"vt", "last_write"}
    text = (tmp_path / "README.md").read_text()
    assert "Bounds missed: none" not in text and "vt/512" in text
    assert card.MISSING not in text and "failed" not in text
    complete.main([str(tmp_path), "--corpus", str(tmp_path)])  # nothing is left to do
    assert len(path.read_text().splitlines()) == len(log) + len(added)


def test_a_benchmark_without_problems_fails(preset: Preset, params) -> None:
    run = logits_fn(preset.architecture.model_config(), make_mesh(1), jnp.float32)
    with pytest.raises(ValueError, match="sheets"):
        evaluate.benchmark(run, params, {})


def test_every_measurement_runs(preset: Preset, params, tmp_path: Path) -> None:
    from jhybrid.demo.corpus import Corpus

    story = "A cat sat on a mat. It saw a big dog. They ran away to the park and slept. " * 20
    for name in ("fiction", "essays", "tinystories"):
        (tmp_path / f"{name}.txt").write_text(story)
    config = preset.architecture.model_config()
    few = dataclasses.replace(preset, trials=2, sample_bytes=4)
    corpus = Corpus.load(tmp_path)
    sheets = {("last_write", 512): make_sheet(tmp_path, "last_write", 512, 2)}
    found = dict(evaluate.evaluate(params, config, few, corpus, sheets, Clock(600.0, 1.0), 0))
    assert {f"recall_{name}" for name in TRIALS} < set(found)
    assert not [name for name, value in found.items() if str(value).startswith("failed")]
    assert found["recall_one_number"]["trials"] == 2
    assert set(found["skills"]) == set(SKILLS)
    assert set(found["benchmark"]["scores"]["last_write"]["512"]) == set(ARMS)
    assert len(found["samples"]) == len(PROMPTS)
    assert 4 < found["held_out_nats_per_byte"]["fiction"] < 8
    late = dict(evaluate.evaluate(params, config, few, corpus, {}, Clock(0.0, 0.0), 0))
    assert set(late.values()) == {card.MISSING}
