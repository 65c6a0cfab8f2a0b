"""Tiny random Qwen3-Next, Qwen3.5 MoE and OLMo-Hybrid checkpoints against transformers, live."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("torch", reason="live parity needs the extra `parity`")

from jhybrid.config import ModelConfig
from jhybrid.convert.__main__ import main
from jhybrid.convert.verify import dense_logits, torch_logits
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.sharding import make_mesh
from jhybrid.weights import load_hf_params, load_params, named
from tests import olmo_fixtures, qwen_moe_fixtures
from tests.greedy import assert_greedy
from tests.hf_fixtures import Case, greedy, routing_gap, write_as
from tests.stepping import cached_logits

PROMPT, NEW = 15, 64
CASES = [(fixtures, c) for fixtures in (qwen_moe_fixtures, olmo_fixtures) for c in fixtures.CASES]


@pytest.mark.parametrize(("fixtures", "case"), CASES, ids=[case.name for _, case in CASES])
def test_every_layout(fixtures: ModuleType, case: Case, tmp_path: Path, mesh: Mesh) -> None:
    """Logits and greedy tokens of the layout that transformers writes; others hold the same."""
    src, dst = fixtures.make_checkpoint(tmp_path / "hf", case), tmp_path / "out"
    assert main([str(src), str(dst)]) == 0
    config = model_config(read_hf_config(dst))
    params = load_params(dst, config, mesh, jnp.float32)
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, PROMPT + NEW))
    assert routing_gap(src, token_ids) > 1e-4
    found = dense_logits(params, token_ids, config, mesh)
    np.testing.assert_allclose(found, torch_logits(src, token_ids), rtol=0, atol=2e-5)
    prompt = token_ids[0, :PROMPT]
    continuation = np.array(greedy(src, prompt, NEW))
    assert_greedy(params, prompt, continuation, config, mesh)

    for name, tensors in fixtures.layouts(src).items():
        folder = write_as(tmp_path / name, tensors, src)
        other = named(load_hf_params(folder, config, mesh, jnp.float32))
        for key, value in named(params).items():
            np.testing.assert_array_equal(np.asarray(other[key]), np.asarray(value), err_msg=key)


@pytest.mark.parametrize("name", ["moe_text", "olmo_irregular"])
def test_every_mesh_gives_the_same(name: str, tmp_path: Path) -> None:
    src, config = _made(name, tmp_path)
    assert config.tensor_parallel_sizes() == [1, 2, 4]
    token_ids = np.random.default_rng(2).integers(0, config.vocab_size, (1, 79))
    expected = torch_logits(src, token_ids)
    for tp in (2, 4):
        mesh = make_mesh(tp)
        params = load_hf_params(src, config, mesh, jnp.float32)
        found = dense_logits(params, token_ids, config, mesh)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=f"tp {tp}")


@pytest.mark.parametrize("name", ["moe_text", "olmo_irregular"])
def test_split_anywhere(name: str, tmp_path: Path, mesh: Mesh) -> None:
    """Prefills cut anywhere, then single tokens, all through caches."""
    src, config = _made(name, tmp_path)
    token_ids = np.random.default_rng(2).integers(0, config.vocab_size, 79)
    expected = torch_logits(src, token_ids[None])[0]
    params = load_hf_params(src, config, mesh, jnp.float32)
    for split in ((79,), (1, 77), (64, 8), (1,)):
        found = cached_logits(params, token_ids, config, mesh, split)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=f"{split}")


def _made(name: str, folder: Path) -> tuple[Path, ModelConfig]:
    fixtures, case = next((f, c) for f, c in CASES if c.name == name)
    src = fixtures.make_checkpoint(folder / "hf", case)
    return src, model_config(read_hf_config(src))
