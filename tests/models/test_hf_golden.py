"""Converted golden checkpoints compute what transformers computed (no torch needed)."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.verify import dense_logits
from jhybrid.convert.writer import write_checkpoint
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.sharding import make_mesh
from jhybrid.weights import load_hf_params, load_params
from tests.golden_files import FOLDERS, name_of
from tests.greedy import assert_greedy
from tests.stepping import cached_logits


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_logits_and_greedy_tokens(folder: Path, tmp_path: Path, mesh: Mesh) -> None:
    config = model_config(read_hf_config(folder))
    write_checkpoint(open_checkpoint(folder), tmp_path / "out")
    params = load_params(tmp_path / "out", config, mesh, jnp.float32)
    with np.load(folder / "expected.npz") as expected:
        found = dense_logits(params, expected["token_ids"][None], config, mesh)[0]
        np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=2e-5)
        assert_greedy(params, expected["prompt"], expected["continuation"], config, mesh)


@pytest.mark.parametrize("name", ["qwen3_5_moe-moe_text", "olmo_hybrid-olmo"])
def test_through_caches_cut_over_ranks(name: str) -> None:
    folder = next(folder for folder in FOLDERS if name_of(folder) == name)
    config, mesh = model_config(read_hf_config(folder)), make_mesh(2)
    params = load_hf_params(folder, config, mesh, jnp.float32)
    with np.load(folder / "expected.npz") as expected:
        found = cached_logits(params, expected["token_ids"], config, mesh, (3, 62))
        np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=2e-5)
