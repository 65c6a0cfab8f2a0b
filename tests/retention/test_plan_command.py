"""python -m jhybrid.plan: the table, the JSON, the plots, the saved plan, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.writer import write_checkpoint
from jhybrid.demo import MODEL_FOLDER
from jhybrid.engine.build import find_model
from jhybrid.models.specs import ModelParams
from jhybrid.plan.__main__ import decay_parameters, main
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.plan_file import plan_path, stored_or_selected
from jhybrid.retention.report import describe, table
from jhybrid.retention.selection import empty_plan, full_plan
from jhybrid.sharding import make_mesh
from jhybrid.weights import load
from tests.synthetic import TINY, write_hf

ROOT = Path(__file__).parents[2]


def numbers(tmp_path: Path, *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json", str(tmp_path / "plan.json")]) == 0
    return json.loads((tmp_path / "plan.json").read_text())


def test_demo_as_a_process(tmp_path: Path) -> None:
    argv = ["-m", "jhybrid.plan", "demo", "--w-max", "16", "--json", str(tmp_path / "p.json")]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "p.json").read_text())
    config = find_model("demo").config
    params: ModelParams = load(MODEL_FOLDER, config, make_mesh(1))
    horizons = static_horizons(params, config)
    assert found["weights"] == horizons.digest
    assert found["ratios"]["kept"] == (horizons.values > 16).sum()
    assert f"{found['ratios']['kept']} units kept" in done.stdout
    assert found["recommendation"] in done.stdout


@pytest.mark.parametrize(
    ("name", "w_max", "capacity", "advice"),
    [
        ("kimi-linear-48b", 16, 2.64, "selection pays"),
        ("qwen3-next-80b", 16, 1.10, "selection alone gains too little"),
        ("qwen3-next-80b", 128, 1.60, "selection alone gains less than int8"),
        ("kimi-k3-slice", 64, 1.61, "selection pays"),
    ],
)
def test_presets(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    w_max: int,
    capacity: float,
    advice: str,
) -> None:
    found = numbers(tmp_path, f"dummy:{name}", "--w-max", str(w_max), "--tp", "8")
    assert abs(found["ratios"]["checkpoint_ragged"] / capacity - 1) < 0.03
    text = capsys.readouterr().out
    assert found["recommendation"] in text
    assert advice in text and "int8" in found["recommendation"]
    for placed in found["ratios"]["placements"]:
        assert f"{placed['placement']:24}{placed['slot_units']:>12,}" in text
    kept = [layer["kept"] for layer in found["layers"]]
    assert sum(kept) == found["ratios"]["kept"]
    assert [layer["layer"] for layer in found["layers"]] == list(
        find_model(f"dummy:{name}").config.linear_layers
    )


def test_a_longer_horizon_keeps_more(tmp_path: Path) -> None:
    """A lower a_s decays more slowly, as does a smaller epsilon remember longer."""
    base = numbers(tmp_path, "demo", "--w-max", "64")
    assert base["a_s"] == -0.3
    slower = numbers(tmp_path, "demo", "--w-max", "64", "--a-s", "-1.5")
    assert slower["a_s"] == -1.5
    smaller = numbers(tmp_path, "demo", "--w-max", "64", "--epsilon", "1e-6")
    for found in (slower, smaller):
        assert found["ratios"]["kept"] > base["ratios"]["kept"]


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in (
        ("demo", {"decay", "horizons", "kept"}),
        ("dummy:kimi-linear-48b", {"decay", "horizons", "kept", "channels"}),
    ):
        folder = tmp_path / name.removeprefix("dummy:")
        assert main([name, "--w-max", "16", "--plots", str(folder)]) == 0
        assert {path.stem for path in folder.iterdir()} == expected
        text = capsys.readouterr().out
        for path in folder.iterdir():
            assert path.read_bytes().startswith(b"\x89PNG")
            assert f"wrote {path}" in text


def test_a_saved_plan_is_what_serving_finds(tmp_path: Path) -> None:
    src = write_hf(tmp_path / "hf", TINY)
    folder = tmp_path / "converted"
    write_checkpoint(open_checkpoint(src), folder)
    assert main([str(folder), "--w-max", "8", "--a-s", "-2.5", "--save"]) == 0
    model = find_model(str(folder))
    plan = stored_or_selected(folder, decay_parameters(model), model.config, 8)
    assert plan.horizons.gate_input == -2.5
    np.testing.assert_array_equal(plan.keep, plan.horizons.values > 8)
    assert plan_path(folder, 8).exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo", "--w-max", "3"], "w_max: expected at least 4 tokens, got 3"),
        (["demo", "--w-max", "16", "--tp", "3"], "tp: expected one of [1, 2, 4]"),
        (["demo", "--w-max", "16", "--epsilon", "2"], "epsilon: expected a number between"),
        (["demo", "--w-max", "16", "--save"], "--save: expected a folder written by"),
        (["dummy:gpt-2", "--w-max", "16"], "dummy: expected one of"),
        (["/nowhere", "--w-max", "16"], "model: expected demo, demo-kda, dummy:<preset> or"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_extreme_plans_have_numbers_and_a_table() -> None:
    model = find_model("demo")
    horizons = static_horizons(decay_parameters(model), model.config)
    empty = describe(empty_plan(horizons, 16), model.config)
    assert empty["ratios"]["temporal_ragged"] is None  # JSON has no infinity
    json.dumps(empty, allow_nan=False)
    assert "all" in table(empty)
    full = describe(full_plan(horizons, 16), model.config)
    assert (full["replay_window"], full["longest_omitted"]) == (0, 0)
    assert "0 tokens at most" in table(full)
