"""Weights from disk straight into the shards of a mesh.

A converted folder holds an Orbax checkpoint of {parameter name: array} and, written last, the
manifest `jhybrid.json`. A Hugging Face folder is converted on the fly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from .config import ModelConfig
from .models.specs import ModelParams, model_specs
from .params import ParamSpec, count_params, is_spec
from .sharding import AXIS, named_sharding, partition_spec

MANIFEST = "jhybrid.json"
ARRAYS = "params"  # the folder of the Orbax checkpoint
FORMAT_VERSION = 1


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a parameter tree by path, such as `layers.0.mixer.qkvz`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unnamed(values: dict[str, Any], like: Any) -> Any:
    """A tree of the structure of `like` with the leaves of a `named` dictionary."""
    treedef = jax.tree.structure(like, is_leaf=is_spec)
    return jax.tree.unflatten(treedef, [values[name] for name in named(like)])


def is_converted(folder: str | Path) -> bool:
    """Whether a folder was written by jhybrid.convert, whole or not."""
    return (Path(folder) / MANIFEST).exists() or (Path(folder) / ARRAYS).exists()


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a converted folder, checked against its files. ValueError otherwise."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {folder} is not a whole jhybrid checkpoint")
    try:
        manifest = json.loads(path.read_text())
        version, files = manifest["format_version"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a jhybrid manifest ({error!r})") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: expected format_version {FORMAT_VERSION}, found {version!r}; "
            "convert the source again"
        )
    for name, size in files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "it is missing" if found is None else f"found {found}"
            raise ValueError(f"{file}: expected {size} bytes ({MANIFEST}), {state}")
    return manifest


def load_params(
    folder: str | Path, config: ModelConfig, mesh: Mesh, dtype: Any = None
) -> ModelParams:
    """The parameters of `config.for_tensor_parallel(tp)`, each device reading only its shard.

    `dtype` None is the dtype the folder was written in; parameters that have a dtype of their
    own (norms, decay) keep it.
    """
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    stored = named(model_specs(config))
    if manifest["parameters"] != count_params(stored):
        raise ValueError(
            f"{folder / MANIFEST}: expected {count_params(stored)} parameters for this config, "
            f"found {manifest['parameters']}"
        )
    specs = model_specs(config.for_tensor_parallel(mesh.size))
    wanted = named(specs)
    model_dtype = jnp.dtype(dtype if dtype is not None else manifest["dtype"])
    args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            sharding=_stored_sharding(spec, wanted[name], mesh),
            global_shape=spec.shape,
            dtype=spec.dtype_in(model_dtype),
        )
        for name, spec in stored.items()
    }
    arrays = _restore(folder, stored, args)
    return unnamed({n: _repeated(arrays[n], wanted[n], mesh) for n in wanted}, specs)


def load_hf_params(
    folder: str | Path, config: ModelConfig, mesh: Mesh, dtype: Any = None
) -> ModelParams:
    """Like `load_params` from a Hugging Face folder: tensor by tensor, without a copy on disk."""
    # The converter builds on this package; only this entry point looks the other way.
    from jhybrid.convert.conversion import open_checkpoint

    conversion = open_checkpoint(folder, dtype, config)
    specs = model_specs(config.for_tensor_parallel(mesh.size))
    out = {}
    for name, spec in named(specs).items():
        value = conversion.parameter(name)
        for axis, (have, want) in enumerate(zip(value.shape, spec.shape, strict=True)):
            if have != want:  # KV heads, repeated over the ranks that share them
                value = np.repeat(value, want // have, axis=axis)
        sharding = named_sharding(mesh, spec.axes)
        array = jax.make_array_from_callback(spec.shape, sharding, _slices(value))
        out[name] = array.block_until_ready()  # or the host copies of many would pile up
    return unnamed(out, specs)


def load(folder: str | Path, config: ModelConfig, mesh: Mesh, dtype: Any = None) -> ModelParams:
    """Parameters of a converted or a Hugging Face folder, whichever it is."""
    loader = load_params if is_converted(folder) else load_hf_params
    return loader(folder, config, mesh, dtype)


def load_some(folder: str | Path, config: ModelConfig, names: list[str]) -> dict[str, np.ndarray]:
    """Some parameters of a converted or a Hugging Face folder by name, whole, on the host."""
    if not is_converted(folder):
        from jhybrid.convert.conversion import open_checkpoint

        conversion = open_checkpoint(folder, None, config)
        return {name: conversion.parameter(name) for name in names}
    folder = Path(folder).absolute()
    read_manifest(folder)
    specs = named(model_specs(config))
    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    return _restore(folder, {name: specs[name] for name in names}, args)


def _restore(folder: Path, specs: dict[str, ParamSpec], args: dict[str, Any]) -> dict[str, Any]:
    """The arrays of `args`, which may be a part of what the folder holds."""
    # Orbax reads parameters concurrently; this bounds the host bytes in flight.
    largest = max(8 * math.prod(spec.shape) for spec in specs.values())
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=max(4, largest // 10**9 + 1))
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            return checkpointer.restore(
                folder / ARRAYS,
                args=ocp.args.PyTreeRestore(
                    item={n: 0 for n in args}, restore_args=args, transforms={}
                ),
            )
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{folder / ARRAYS}: cannot be restored ({error})") from error


def _slices(value: np.ndarray) -> Callable[[Any], np.ndarray]:
    return lambda index: value[index]


def _stored_sharding(stored: ParamSpec, wanted: ParamSpec, mesh: Mesh) -> NamedSharding:
    """How the array on disk is cut so that each rank reads what it will hold.

    With more ranks than KV heads, consecutive ranks share a head: the mesh is folded into
    (heads, copies) and the heads are cut over the first axis.
    """
    for have, want in zip(stored.shape, wanted.shape, strict=True):
        if have != want:
            folded = Mesh(mesh.devices.reshape(have, -1), (AXIS, "copy"))
            return NamedSharding(folded, partition_spec(stored.axes))
    return named_sharding(mesh, stored.axes)


def _repeated(array: jax.Array, wanted: ParamSpec, mesh: Mesh) -> jax.Array:
    """The same shards seen as one array over `mesh`, in which shared heads appear repeatedly."""
    if array.shape == wanted.shape:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    sharding = named_sharding(mesh, wanted.axes)
    return jax.make_array_from_single_device_arrays(wanted.shape, sharding, shards)
