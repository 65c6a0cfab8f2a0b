"""Kimi-K3 against a float64 model written from its formulas: nine layers in three blocks."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.verify import dense_logits
from jhybrid.hf_config import model_config
from jhybrid.sharding import make_mesh
from jhybrid.weights import load_hf_params, named
from tests.assertions import assert_close
from tests.k3_fixtures import CONFIG, make_tensors, write
from tests.kimi_oracle import Oracle, unpack_mxfp4
from tests.stepping import cached_logits

TOKENS = 70  # past one chunk of the recurrence
BOUND = 2e-5  # float32 rounding, amplified by random weights; a wrong formula is far above


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return make_tensors()


@pytest.fixture(scope="module")
def folder(tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("k3") / "hf", tensors)


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 96, TOKENS)


@pytest.fixture(scope="module")
def expected(tensors: dict[str, np.ndarray], token_ids: np.ndarray) -> np.ndarray:
    oracle = Oracle(tensors, CONFIG)
    out = oracle.run(token_ids)
    assert oracle.gap > 1e-5, "a choice of experts is too close to call"
    return out


def test_logits(folder: Path, token_ids: np.ndarray, expected: np.ndarray, mesh: Mesh) -> None:
    config = model_config(CONFIG)
    assert config.residual_block == 3 and len(config.layers) == 9
    params = load_hf_params(folder, config, mesh, jnp.float32)
    found = dense_logits(params, token_ids[None], config, mesh)[0]
    assert_close("logits", found, expected, BOUND)


def test_through_caches_cut_over_ranks(
    folder: Path, token_ids: np.ndarray, expected: np.ndarray
) -> None:
    config, mesh = model_config(CONFIG), make_mesh(2)
    params = load_hf_params(folder, config, mesh, jnp.float32)
    for pieces in ((TOKENS,), (1, 64), (30,)):
        found = cached_logits(params, token_ids, config, mesh, pieces)
        assert_close(f"logits of {pieces}", found, expected, BOUND)


def test_other_layouts_hold_the_same(
    tensors: dict[str, np.ndarray], folder: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """Text alone, its config saying kimi_linear; experts unpacked; A_log without padding."""
    other = {}
    for name, x in tensors.items():
        base = name.removeprefix("language_model.")
        if base.endswith("A_log"):
            x = x[:4]
        if base.endswith("weight_packed"):
            scale = tensors[name.replace("packed", "scale")]
            base, x = base.replace("_packed", ""), unpack_mxfp4(x, scale).astype(np.float32)
        if not base.endswith("weight_scale"):
            other[base] = x
    text = CONFIG["text_config"]
    assert text["model_type"] == "kimi_linear"
    config = model_config(text)
    assert config == model_config(CONFIG) and config.family == "kimi_k3"
    second = write(tmp_path / "text", other, text)
    params = [named(load_hf_params(f, config, mesh, jnp.bfloat16)) for f in (folder, second)]
    for name, value in params[0].items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(params[1][name]), err_msg=name)


def test_half_a_packed_expert(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    scale = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight_scale"
    extra = "language_model.model.layers.2.block_sparse_moe.experts.8.w1.weight_packed"
    changed = {name: x for name, x in tensors.items() if name != scale}
    changed[extra] = np.zeros((32, 16), np.uint8)
    with pytest.raises(ValueError) as error:
        open_checkpoint(write(tmp_path / "hf", changed))
    assert str(error.value).splitlines()[1:] == [
        f"  tensor {scale} [32, 1] is missing",
        f"  tensor {extra} [32, 16] is left over: no rule or skip names it",
    ]
