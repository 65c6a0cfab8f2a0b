"""Tiny random checkpoints against transformers, live."""

from __future__ import annotations

import importlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("torch", reason="live parity needs the extra `parity`")

from jhybrid.convert.__main__ import main
from jhybrid.convert.families.common import unchanged
from jhybrid.convert.verify import dense_logits, torch_logits
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.weights import load_params
from tests.greedy import assert_greedy
from tests.hf_fixtures import CASES, Case, greedy, make_checkpoint

PROMPT, NEW = 15, 64


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_tokens(case: Case, tmp_path: Path, mesh: Mesh) -> None:
    src, dst = make_checkpoint(tmp_path / "hf", case), tmp_path / "out"
    assert main([str(src), str(dst)]) == 0
    config = model_config(read_hf_config(dst))
    params = load_params(dst, config, mesh, jnp.float32)
    rng = np.random.default_rng(1)
    token_ids = rng.integers(0, config.vocab_size, (1, PROMPT + NEW))
    found = dense_logits(params, token_ids, config, mesh)
    np.testing.assert_allclose(found, torch_logits(src, token_ids), rtol=0, atol=2e-5)
    prompt = token_ids[0, :PROMPT]
    assert_greedy(params, prompt, np.array(greedy(src, prompt, NEW)), config, mesh)


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = make_checkpoint(tmp_path / "hf", CASES[0])
    arguments = [str(src), str(tmp_path / "out"), "--verify"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert "verified: max abs logit difference" in capsys.readouterr().err


def test_verify_fails_on_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A norm convention gone wrong is what --verify is for; it leaves nothing at DST."""
    src = make_checkpoint(tmp_path / "hf", CASES[0])
    qwen = importlib.import_module("jhybrid.convert.families.qwen")
    monkeypatch.setattr(qwen, "zero_centred", lambda t, s, size: unchanged(t, s, (size,)))
    assert main([str(src), str(tmp_path / "out"), "--verify"]) == 2
    assert "logits differ from transformers by" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
