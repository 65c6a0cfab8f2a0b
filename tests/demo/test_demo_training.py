"""The training program on a model of a few thousand parameters: schedule, step, files, card."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.batch import DenseBatch
from jhybrid.demo import evaluate
from jhybrid.demo.batches import TASK_NAMES, BatchSpec, BatchStream, worker_pool
from jhybrid.demo.clock import Clock, learning_rate
from jhybrid.demo.export import rounded, write_model
from jhybrid.demo.model import (
    HORIZONS,
    cast,
    gates_fn,
    initial_params,
    logits_fn,
    static_horizons,
    text_horizons,
)
from jhybrid.demo.optimize import (
    DeviceBatch,
    initial_state,
    lower_step,
    make_optimizer,
    make_step,
    replicated,
)
from jhybrid.demo.presets import PRESETS, Preset
from jhybrid.demo.tokenizer import END_OF_TEXT
from jhybrid.models.specs import model_specs
from jhybrid.params import count_bytes, count_params
from jhybrid.sharding import make_mesh
from jhybrid.weights import named
from tests.demo.small import dense_run, small

LENGTH, ROWS = 64, 4


def test_demo_models_fit_their_size_and_are_equally_large() -> None:
    specs = [model_specs(PRESETS[name].architecture.model_config()) for name in ("gdn", "kda")]
    counts = [count_params(spec) for spec in specs]
    assert min(counts) > 4.5e6 and max(counts) / min(counts) < 1.02
    for spec in specs:
        assert count_bytes(spec, jnp.bfloat16) < 11.9e6  # the file is to be at most 12 MB


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_consistent(name: str) -> None:
    preset = PRESETS[name]
    assert [p.until for p in preset.phases] == sorted({p.until for p in preset.phases})
    assert preset.phases[-1].until == 1
    assert preset.phase_at(0) is preset.phases[0]
    assert preset.phase_at(1.5) is preset.phases[-1]
    assert preset.continued().lengths and preset.continued().peak_lr < preset.peak_lr
    for phase in (*preset.phases, *preset.continued().phases):
        assert set(phase.mix) <= set(TASK_NAMES)
        assert sum(phase.mix.values()) == pytest.approx(1)
        assert sum(phase.lengths.values()) == pytest.approx(1)
    for length in {*preset.lengths, *preset.continued().lengths}:
        assert preset.tokens_per_batch[length] % length == 0


def test_learning_rate_follows_steps_then_the_clock() -> None:
    def rate(fraction: float, step: int) -> float:
        shape = {"peak": 1.0, "final": 0.01, "hold_until": 0.5, "warmup": 10}
        return learning_rate(fraction, step, **shape)

    assert rate(0.0, 0) == pytest.approx(0.1)
    assert rate(0.2, 9) == rate(0.5, 1000) == 1
    assert rate(0.75, 1000) == pytest.approx(0.505)
    assert rate(1.0, 1000) == rate(1.2, 1000) == pytest.approx(0.01)


def test_clock_keeps_the_reserve() -> None:
    clock = Clock(100.0, 30.0)
    assert 0 <= clock.fraction < 0.01
    assert clock.left == pytest.approx(100, abs=1)
    assert clock.fraction == pytest.approx(clock.elapsed / 70, abs=1e-3)


def test_horizons_start_spread(params) -> None:
    horizons = static_horizons(params)
    assert list(horizons) == ["0"]
    part = (HORIZONS[1] / HORIZONS[0]) ** (1 / len(horizons["0"]))
    for i, value in enumerate(horizons["0"]):
        # one head in each part of the log range; quoted at a gate input below zero
        low = HORIZONS[0] * part**i
        assert low < value < 1.5 * low * part


def test_step_learns_and_gates_move_slowly(preset: Preset, params) -> None:
    mesh, config = make_mesh(1), preset.architecture.model_config()
    optimizer = make_optimizer(config, preset)
    state = jax.device_put(initial_state(params, optimizer), replicated(mesh))
    step = make_step(config, preset, optimizer, mesh, jnp.float32)
    compiled = lower_step(step, state, mesh, ROWS, LENGTH).compile()
    ids = np.tile(np.arange(65, 65 + 13, dtype=np.uint16), 8)[: LENGTH + 1]
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[1:] = 0.03
    task = np.array([0, 3, 3, 3], np.int32)
    cut = np.full(ROWS, LENGTH, np.int32)
    rows = DeviceBatch(np.tile(ids, (ROWS, 1)), weights, task, cut, cut)
    batch = jax.device_put(rows, replicated(mesh))
    before, losses = jax.device_get(named(params)), []
    state = jax.tree.map(jnp.copy, state)  # donated: the fixture's arrays must outlive it
    for _ in range(12):
        state, loss = compiled(state, batch, np.float32(1e-2))
        losses.append(float(loss))
    assert losses[0] == pytest.approx(math.log(272), abs=1.0)
    assert losses[-1] < losses[0] - 2
    measured = np.asarray(state.by_task)
    assert measured[0, 2] == 12 * LENGTH
    assert measured[3, 2] == 0  # light positions are not measured
    moved = {k: np.abs(v - before[k]).max() for k, v in jax.device_get(named(state.params)).items()}
    assert 0 < moved["layers.0.mixer.dt_bias"] < 0.15 * moved["layers.0.mixer.qkvz"]
    # a step that is not finite leaves the parameters alone and is counted
    kept = jax.device_get(named(state.params))
    spoiled = dataclasses.replace(state.params, norm=state.params.norm * np.nan)
    bad = dataclasses.replace(state, params=spoiled)
    after, _ = compiled(bad, batch, np.float32(1e-2))
    assert int(after.skipped) == 1
    assert np.array_equal(kept["embedding"], np.asarray(after.params.embedding))


def test_padding_to_the_right_changes_nothing(preset: Preset, params) -> None:
    """The evaluation's writer relies on it."""
    config = preset.architecture.model_config()
    run = dense_run(config)
    ids = np.random.default_rng(0).integers(0, 256, (2, 96)).astype(np.int32)
    padded = ids.copy()
    padded[:, 70:] = END_OF_TEXT
    same = np.asarray(run(params, ids))[:, :70]
    np.testing.assert_allclose(np.asarray(run(params, padded))[:, :70], same, atol=1e-5)

    writer = evaluate.Writer(run, params)
    prompts = [ids[0, :40].astype(np.uint16), ids[1, :55].astype(np.uint16)]
    together = writer.write(prompts, 6, 96)
    assert together == [writer.write([p, p], 6, 96)[0] for p in prompts]


@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-kda"])
def test_cuts_withhold_what_they_say(name: str) -> None:
    """With both cuts nothing of the text before counts behind them; with one cut, something does.

    (Convolutions see three tokens back, so the rows differ before that.)
    """
    config, cut = small(name).architecture.model_config(), 40
    params = initial_params(config, 0)
    run = jax.jit(logits_fn(config, make_mesh(1), jnp.float32))
    ids = np.random.default_rng(0).integers(0, 256, (2, 64)).astype(np.int32)
    ids[1, cut - 4 :] = ids[0, cut - 4 :]

    def differs(state_cut: int, key_cut: int) -> float:
        at = (jnp.full(2, where, jnp.int32) for where in (state_cut, key_cut))
        rows = np.asarray(run(params, DenseBatch(jnp.asarray(ids), *at)))[:, cut:]
        return float(np.abs(rows[0] - rows[1]).max())

    assert differs(cut, cut) < 1e-4
    assert differs(64, cut) > 1e-3
    assert differs(cut, 64) > 1e-3


@pytest.mark.parametrize(("name", "units"), [("tiny-gdn", 4), ("tiny-kda", 16)])
def test_gate_horizons_follow_the_text(name: str, units: int) -> None:
    config = small(name).architecture.model_config()
    params = initial_params(config, 0)
    assert len(static_horizons(params)["0"]) == units
    decays = gates_fn(config, make_mesh(1), jnp.float32)(params, jnp.arange(128).reshape(2, 64))
    for layer in text_horizons(decays):
        assert layer["mean"] == sorted(layer["mean"])
        assert all(f < s for f, s in zip(layer["fast"], layer["slow"], strict=True))


@pytest.mark.parametrize(
    ("name", "model_class"),
    [("tiny-gdn", "Qwen3_5ForCausalLM"), ("tiny-kda", "KimiLinearForCausalLM")],
)
def test_exported_folder_matches_transformers(name: str, model_class: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    preset = small(name)
    config = preset.architecture.model_config()
    params = initial_params(config, 0)
    params = jax.tree.map(lambda p: p + 0.05 * np.cos(np.arange(p.size)).reshape(p.shape), params)
    write_model(tmp_path, params, preset.architecture.hf_config())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(model).__name__ == model_class
    ids = np.random.default_rng(0).integers(0, 263, (2, 80))
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    ours = dense_run(config)(rounded(params, config), jnp.asarray(ids))
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4)


def test_rounded_keeps_gates_in_float32(preset: Preset, params) -> None:
    config = preset.architecture.model_config()
    kinds = {name: value.dtype for name, value in named(cast(params, config, jnp.bfloat16)).items()}
    assert kinds["layers.0.mixer.A_log"] == kinds["layers.0.mixer.dt_bias"] == jnp.float32
    assert kinds["embedding"] == kinds["layers.0.mixer.conv"] == jnp.bfloat16
    again = named(rounded(rounded(params, config), config))
    for name, value in named(rounded(params, config)).items():
        assert np.array_equal(value, again[name]), name


def test_batch_stream_keeps_order(tmp_path: Path) -> None:
    for name in ("fiction", "essays", "tinystories"):
        (tmp_path / f"{name}.txt").write_text("A cat sat. It saw a dog. They ran.\n")
    lengths = iter([64, 128] * 8)
    asked: list[int] = []

    def next_spec() -> BatchSpec:
        asked.append(next(lengths))
        return BatchSpec((0, len(asked)), asked[-1], 2, (("recall", 1.0),))

    pool = worker_pool(tmp_path, 1)
    stream = BatchStream(pool, next_spec, ahead=2)
    try:
        got = [next(stream).length for _ in range(4)]
    finally:
        stream.close()
        pool.shutdown()
    assert got == asked[:4]
    assert len(asked) == 6
