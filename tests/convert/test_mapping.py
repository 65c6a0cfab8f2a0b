"""Every tensor used once, every parameter filled once, and everything that is wrong in one list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jhybrid.convert import mapping
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.export import export_hf
from jhybrid.convert.families import family_of
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.models.specs import model_specs
from jhybrid.weights import load_hf_params, named
from tests.golden_files import FOLDERS, name_of
from tests.synthetic import TINY, write_hf


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint whose tensors (or config) were changed."""

    def make(change: Callable[[dict[str, np.ndarray]], Any], **config: Any) -> Path:
        folder = write_hf(tmp_path / "hf", TINY | config)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def test_every_problem_is_listed_at_once(edit: Callable[..., Path]) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.3.self_attn.k_norm.weight"]
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((32, 47), np.float32)
        tensors["model.layers.1.linear_attn.A_log"] = np.zeros(8, np.int32)
        tensors["model.layers.9.surprise"] = np.zeros((2, 3), np.float32)
        tensors["mtp.fc.weight"] = np.zeros(1, np.float32)  # a named skip

    with pytest.raises(ValueError) as error:
        open_checkpoint(edit(change))
    assert str(error.value).splitlines() == [
        "checkpoint does not fit the model (4):",
        "  tensor model.layers.0.mlp.down_proj.weight in model.safetensors: "
        "expected shape [32, 48], found [32, 47]",
        "  tensor model.layers.1.linear_attn.A_log in model.safetensors: "
        "expected dtype float64, float32, float16, bfloat16; found int32",
        "  tensor model.layers.3.self_attn.k_norm.weight [32] is missing",
        "  tensor model.layers.9.surprise [2, 3] is left over: no rule or skip names it",
    ]


def test_rules_must_fill_the_parameters(edit: Callable[..., Path]) -> None:
    folder = edit(lambda tensors: None)
    config = model_config(TINY)
    conversion = open_checkpoint(folder)
    rules = family_of(TINY)(config, ()).rules
    twice = mapping.Table((*rules[1:], rules[2]))
    specs = named(model_specs(config)) | {"extra": conversion.specs["norm"]}
    with pytest.raises(ValueError) as error:
        mapping.check(twice, conversion.reader, specs)
    lines = str(error.value)
    assert "parameter embedding has no rule" in lines
    assert "parameter extra has no rule" in lines
    assert "parameter head is filled 2 times" in lines
    assert "tensor lm_head.weight is used 2 times" in lines
    assert "tensor model.embed_tokens.weight [96, 32] is left over" in lines


def test_unknown_model_type(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, TINY)
    (folder / "config.json").write_text(json.dumps(TINY | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"model_type: expected one of \[.*'qwen3_5', .*'gpt2'"):
        open_checkpoint(folder)


def test_head_of_a_tied_model(edit: Callable[..., Path]) -> None:
    def same(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    def different(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    folder = edit(same, tie_word_embeddings=True)
    assert "head" not in open_checkpoint(folder).specs
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs .* tie_word_embeddings"):
        open_checkpoint(edit(different, tie_word_embeddings=True))


def test_untied_model_without_head(edit: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"\(1\):\n  tensor lm_head\.weight .* is missing"):
        open_checkpoint(edit(lambda tensors: tensors.pop("lm_head.weight")))


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_export_then_convert_is_bit_equal(
    folder: Path, dtype: Any, tmp_path: Path, mesh: Mesh
) -> None:
    hf_config = read_hf_config(folder)
    config = model_config(hf_config)
    params = load_hf_params(folder, config, mesh, dtype)
    export_hf(params, hf_config, tmp_path)
    _assert_same(params, load_hf_params(tmp_path, config, mesh))


def test_export_needs_the_parameters_of_the_config(tmp_path: Path, mesh: Mesh) -> None:
    params = load_hf_params(write_hf(tmp_path / "hf", TINY), model_config(TINY), mesh)
    with pytest.raises(ValueError, match=r"these differ: \['head'\]"):
        export_hf(params, TINY | {"tie_word_embeddings": True}, tmp_path / "out")


def _assert_same(first: Any, second: Any) -> None:
    a, b = named(first), named(second)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name
