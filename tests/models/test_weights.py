"""Loading: straight into shards, equal whatever the mesh, and never from half a folder."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.config import ModelConfig
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.verify import dense_logits
from jhybrid.convert.writer import write_checkpoint
from jhybrid.hf_config import model_config
from jhybrid.models.specs import model_specs
from jhybrid.sharding import SHARDED_AXES, make_mesh
from jhybrid.weights import load, load_hf_params, load_params, named, read_manifest
from tests.synthetic import TINY, write_hf


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model as a Hugging Face folder and converted."""
    src = write_hf(tmp_path_factory.mktemp("weights") / "hf", TINY)
    dst = src.parent / "converted"
    write_checkpoint(open_checkpoint(src), dst)
    return src, dst


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return model_config(TINY)


@pytest.mark.parametrize("loader", ["hf", "converted"])
@pytest.mark.parametrize("tp", [2, 4])
def test_sharded_equals_whole(
    folders: tuple[Path, Path], config: ModelConfig, loader: str, tp: int
) -> None:
    src = folders[loader == "converted"]
    whole = load_hf_params(folders[0], config, make_mesh(1))
    mesh = make_mesh(tp)
    cut = load(src, config, mesh)
    specs = named(model_specs(config.for_tensor_parallel(tp)))
    for name, array in named(cut).items():
        expected = np.asarray(named(whole)[name])
        if expected.shape != array.shape:  # two KV heads over four ranks
            assert tp == 4 and name.split(".")[-1] in ("k", "v")
            expected = np.repeat(expected, 2, axis=0)
        np.testing.assert_array_equal(np.asarray(array), expected, err_msg=name)
        local = array.addressable_shards[0].data.size
        is_cut = any(axis in SHARDED_AXES for axis in specs[name].axes)
        assert local == math.prod(array.shape) // (tp if is_cut else 1), name
    if loader == "hf":
        return
    ids = np.arange(30).reshape(2, 15)
    a = dense_logits(whole, ids, config, make_mesh(1))
    np.testing.assert_allclose(dense_logits(cut, ids, config, mesh), a, atol=1e-5)


def test_dtype_is_for_weights_without_their_own(
    folders: tuple[Path, Path], config: ModelConfig
) -> None:
    mesh = make_mesh(1)
    for loader, folder in ((load_params, folders[1]), (load_hf_params, folders[0])):
        values = named(loader(folder, config, mesh, jnp.bfloat16))
        for name, spec in named(model_specs(config)).items():
            assert values[name].dtype == spec.dtype_in(jnp.bfloat16), name
    assert named(load_params(folders[1], config, mesh))["embedding"].dtype == jnp.float32


def test_tp_that_does_not_divide(folders: tuple[Path, Path], config: ModelConfig) -> None:
    for folder in folders:
        with pytest.raises(ValueError, match=r"tp: expected one of \[1, 2, 4\]"):
            load(folder, config, make_mesh(3))


@pytest.fixture
def copy(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(folders[1], tmp_path / "copy")


def test_no_manifest(copy: Path, config: ModelConfig) -> None:
    (copy / "jhybrid.json").unlink()
    with pytest.raises(ValueError, match=r"jhybrid\.json: no such file"):
        load(copy, config, make_mesh(1))


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_bad_manifest(copy: Path, config: ModelConfig, text: str) -> None:
    (copy / "jhybrid.json").write_text(text)
    with pytest.raises(ValueError, match=r"jhybrid\.json: not a jhybrid manifest"):
        load(copy, config, make_mesh(1))


def test_other_format_version(copy: Path, config: ModelConfig) -> None:
    manifest = read_manifest(copy) | {"format_version": 2}
    (copy / "jhybrid.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"jhybrid\.json: expected format_version 1, found 2"):
        load(copy, config, make_mesh(1))


def test_partial_copy(copy: Path, config: ModelConfig) -> None:
    largest = max((p for p in copy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"{largest.name}: expected {len(data)} bytes"):
        load(copy, config, make_mesh(1))
    largest.unlink()
    with pytest.raises(ValueError, match=rf"{largest.name}: .*it is missing"):
        load(copy, config, make_mesh(1))


def test_config_of_another_model(folders: tuple[Path, Path]) -> None:
    other = model_config(TINY | {"num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"jhybrid\.json: expected \d+ parameters"):
        load(folders[1], other, make_mesh(1))
