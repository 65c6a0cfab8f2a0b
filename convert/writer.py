"""Writing a converted folder: streamed, and either whole or not there.

Parameters go into one Orbax checkpoint as leaves that are made when Orbax serialises them and
dropped when they are on disk. All files are written in a locked sibling of the destination; the
manifest comes last, then one rename puts the folder in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jhybrid.params import ParamSpec, count_bytes, count_params
from jhybrid.tokenizer.tiktoken import write_tokenizer
from jhybrid.weights import ARRAYS, FORMAT_VERSION, MANIFEST

from .conversion import Conversion

# Files are read chunk by chunk when a rank loads its shard of a parameter.
CHUNK_BYTES, WHOLE_BYTES = 16 << 20, 1 << 20

# What belongs to a checkpoint besides its weights.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template*",
    "*.jinja",
    "LICENSE*",
)

Progress = Callable[[str, int], object]  # parameter name, bytes written


def write_checkpoint(
    conversion: Conversion,
    dst: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    before_rename: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Convert into the folder `dst` and return its manifest.

    `before_rename` sees the finished folder at its temporary place; if it raises, nothing stays.
    """
    dst = Path(dst).absolute()
    check_destination(conversion.folder, dst, overwrite=overwrite)
    with _staging(dst) as staging:
        work = staging / "new"
        work.mkdir()
        digest = _write_arrays(conversion, work / ARRAYS, progress)
        _copy_companions(conversion.folder, work)
        write_tokenizer(conversion.folder, work)
        manifest = _manifest(conversion, work, digest)
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if before_rename is not None:
            before_rename(work)
        if dst.exists():
            dst.rename(staging / "old")
        work.rename(dst)
    return manifest


def check_destination(src: Path, dst: Path, *, overwrite: bool) -> None:
    """ValueError unless `dst` is free, empty, or a converted folder that may be replaced."""
    src, dst = src.resolve(), dst.resolve()
    if src == dst or dst in src.parents or src in dst.parents:
        raise ValueError(f"{dst}: expected a folder apart from the source {src}")
    if not dst.exists():
        return
    if not dst.is_dir():
        raise ValueError(f"{dst}: expected a folder, found a file")
    if not any(dst.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{dst}: not empty; give --overwrite to replace a converted checkpoint")
    if not (dst / MANIFEST).is_file():
        raise ValueError(f"{dst}: without {MANIFEST}; only a converted checkpoint is replaced")


@dataclass
class LazyLeaf:
    """A leaf of the saved tree that comes into being when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], np.ndarray]


class LazyLeafHandler(type_handlers.NumpyHandler):
    """Saves LazyLeaf values as arrays, one after another, each on disk before the next is made."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        args = args if args is not None else [ocp.SaveArgs()] * len(values)
        for leaf, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([leaf.make()], [info], [arg]):
                written.result()
        return []


def _write_arrays(conversion: Conversion, folder: Path, progress: Progress | None) -> str:
    """Stream all parameters; the digest covers names, shapes, dtypes and contents."""
    lines: dict[str, str] = {}

    def leaf(name: str, spec: ParamSpec) -> LazyLeaf:
        def make() -> np.ndarray:
            value = conversion.parameter(name)
            content = hashlib.sha256(value.reshape(-1).view(np.uint8).data).hexdigest()
            lines[name] = f"{name} {value.dtype} {list(value.shape)} {content}\n"
            if progress is not None:
                progress(name, value.nbytes)
            return value

        return LazyLeaf(spec.shape, spec.dtype_in(conversion.dtype), make)

    tree = {name: leaf(name, spec) for name, spec in conversion.specs.items()}
    registry = type_handlers.create_type_handler_registry(
        (LazyLeaf, LazyLeafHandler()), (jax.Array, type_handlers.ArrayHandler())
    )
    # Plain zarr files: in its OCDBT format, what Orbax holds while saving grows with the model.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
    save_args = {n: _save_args(spec, conversion.dtype) for n, spec in conversion.specs.items()}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def _save_args(spec: ParamSpec, dtype: Any) -> ocp.SaveArgs:
    """Chunks along the axis of heads, so that a rank reads its heads and nothing else.

    Orbax cuts a named axis down to single entries, which suits heads but not wide axes (vocab,
    ffn): those are the longest of their parameters, and the longest is cut first. Small
    parameters stay whole, or there would be thousands of tiny files.
    """
    heads = tuple(i for i, axis in enumerate(spec.axes) if axis is not None and "heads" in axis)
    large = math.prod(spec.shape) * spec.dtype_in(dtype).itemsize > WHOLE_BYTES
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=heads if large else ())


def _copy_companions(src: Path, work: Path) -> None:
    for pattern in COMPANIONS:
        for path in sorted(src.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, work / path.name)


def _manifest(conversion: Conversion, work: Path, digest: str) -> dict[str, Any]:
    files = sorted(path for path in work.rglob("*") if path.is_file())
    return {
        "format_version": FORMAT_VERSION,
        "family": conversion.config.family,
        "dtype": str(conversion.dtype),
        "source": conversion.folder.resolve().name,
        "parameters": count_params(conversion.specs),
        "bytes": count_bytes(conversion.specs, conversion.dtype),
        "digest": f"sha256:{digest}",
        "files": {str(path.relative_to(work)): path.stat().st_size for path in files},
    }


@contextmanager
def _staging(dst: Path) -> Iterator[Path]:
    """A locked temporary sibling of `dst`; those that killed conversions left are removed."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{dst.name}.partial-"
    for stale in dst.parent.glob(f"{prefix}*"):
        with _lock(stale) as mine:
            if mine:
                shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=dst.parent))
    try:
        with _lock(staging) as mine:
            if not mine:  # another conversion saw it unlocked and took it for stale
                raise ValueError(f"{dst}: another conversion is writing there")
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Try to lock a folder for the life of this process; the kernel unlocks it for a dead one."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
