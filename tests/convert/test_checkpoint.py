"""Folders that are not whole are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jhybrid.convert.checkpoint import CheckpointReader
from tests.synthetic import TINY, write_hf

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", TINY, shards=3)


def test_reads_what_was_written(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.int32),
        "scalar": np.array(3.0, np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reader = CheckpointReader(tmp_path)
    assert set(reader) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(reader.read(name), value)
        assert reader.read(name).dtype == value.dtype == reader[name].dtype
    assert reader.same("a", "a") and not reader.same("a", "b")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors or .* found neither"):
        CheckpointReader(tmp_path)


def test_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(ValueError, match=rf"index\.json: 1 shards .* missing: \['{SHARD}'\]"):
        CheckpointReader(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_truncated_shard(folder: Path, keep: int) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:keep])
    with pytest.raises(ValueError, match=rf"{SHARD}: truncated"):
        CheckpointReader(folder)


def test_corrupt_header(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[8:20] = b"\xff" * 12
    (folder / SHARD).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{SHARD}: the safetensors header is corrupt"):
        CheckpointReader(folder)


def test_header_sizes_disagree(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"tensor 'w': expected 12 bytes .* offsets 0 to 8"):
        CheckpointReader(tmp_path)


def test_unknown_dtype(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(1)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="tensor 'w': dtype 'F4' is not supported"):
        CheckpointReader(tmp_path)


def test_index_names_a_tensor_its_shard_lacks(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = SHARD
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"'ghost' in {SHARD}, found nowhere"):
        CheckpointReader(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    name = "model.norm.weight"
    save_file({name: np.zeros(3, np.float32)}, folder / "more.safetensors")
    index["weight_map"]["other"] = "more.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"more\.safetensors: tensor '{name}' is also in"):
        CheckpointReader(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_bad_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: expected JSON with a weight_map"):
        CheckpointReader(folder)


def test_index_outside_the_folder(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"w": "../model.safetensors"}}')
    with pytest.raises(ValueError, match="expected file names in this folder"):
        CheckpointReader(folder)
