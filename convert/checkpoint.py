"""Reading Hugging Face safetensors checkpoints, sharded or not, one tensor at a time.

Headers are read and checked up front; the data of a tensor is read when it is asked for, with
plain reads and not a memory map, so that resident memory is what the caller holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCK = 16 << 20

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `offset` counts from the start of the file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointReader(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint folder by name. ValueError for a folder that is not whole."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._infos: dict[str, TensorInfo] = {}
        single, index = self.folder / SINGLE, self.folder / INDEX
        if single.is_file():
            self._add(read_header(single))
        elif index.is_file():
            self._read_index(index)
        else:
            raise ValueError(f"{self.folder}: expected {SINGLE} or {INDEX}, found neither")

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, in the dtype it is stored in."""
        info = self._infos[name]
        with info.file.open("rb") as file:
            file.seek(info.offset)
            data = np.fromfile(file, info.dtype, math.prod(info.shape))
        if data.size != math.prod(info.shape):
            raise ValueError(f"{info.file}: tensor {name!r} ends early; was the file changed?")
        return data.reshape(info.shape)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same bytes, compared block by block."""
        a, b = self._infos[first], self._infos[second]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        with a.file.open("rb") as left, b.file.open("rb") as right:
            left.seek(a.offset)
            right.seek(b.offset)
            rest = a.nbytes
            while rest > 0:
                size = min(BLOCK, rest)
                if left.read(size) != right.read(size):
                    return False
                rest -= size
        return True

    def _add(self, infos: list[TensorInfo]) -> None:
        for info in infos:
            known = self._infos.get(info.name)
            if known is not None:
                raise ValueError(
                    f"{info.file}: tensor {info.name!r} is also in {known.file.name}; "
                    "expected each tensor in one shard"
                )
            self._infos[info.name] = info

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            items = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: expected JSON with a weight_map ({error!r})") from error
        shards = sorted(set(items.values()))
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise ValueError(f"{index}: expected file names in this folder, found {outside}")
        missing = [shard for shard in shards if not (self.folder / shard).is_file()]
        if missing:
            raise ValueError(f"{index}: {len(missing)} shards named there are missing: {missing}")
        for shard in shards:
            self._add(read_header(self.folder / shard))
        for name, shard in items.items():
            info = self._infos.get(name)
            if info is None or info.file.name != shard:
                found = "nowhere" if info is None else f"in {info.file.name}"
                raise ValueError(f"{index}: expected tensor {name!r} in {shard}, found {found}")


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file; checks the header and that the file is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ValueError(
                f"{path}: truncated or not safetensors: its header needs {8 + length} bytes, "
                f"the file has {size}"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [(name, *_entry(value)) for name, value in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: the safetensors header is corrupt ({error!r})") from error
    start, infos, end = 8 + length, [], 0
    for name, kind, shape, (first, last) in entries:
        if kind not in DTYPES:
            raise ValueError(f"{path}: tensor {name!r}: dtype {kind!r} is not supported")
        info = TensorInfo(name, DTYPES[kind], shape, path, start + first)
        if first < 0 or last - first != info.nbytes:
            raise ValueError(
                f"{path}: tensor {name!r}: expected {info.nbytes} bytes for {kind} {shape}, "
                f"found offsets {first} to {last}"
            )
        infos.append(info)
        end = max(end, last)
    if start + end != size:
        raise ValueError(
            f"{path}: truncated or corrupt: expected {start + end} bytes, found {size}"
        )
    return infos


def _entry(value: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    first, last = value["data_offsets"]
    return str(value["dtype"]), tuple(int(n) for n in value["shape"]), (int(first), int(last))
