"""From flags to a warm engine: find the model, size the pools, load, compile."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import shutil
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from ..cache.cache_manager import CacheManager
from ..config import ModelConfig, require
from ..demo import MODEL_FOLDER
from ..hf_config import model_config, read_hf_config
from ..models.hybrid import ModelParams, cache_specs, model_specs
from ..params import count_bytes, init_params
from ..presets import preset
from ..sharding import make_mesh
from ..tokenizer.tiktoken import write_tokenizer
from ..weights import load
from .config import EngineConfig
from .engine import Engine
from .model_runner import ModelRunner, make_buckets

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 32768
CPU_POOL = 256 * 1024**2  # bytes for KV, and again for states, where nothing says how much is free
GPU_SHARE = 0.92  # of the device's memory; the rest is the runtime's
GPU_WORKSPACE = 3 * 1024**3  # activations and logits of a step
STATE_SHARE = 0.4  # of what is left after the parameters and the workspace


@dataclass(frozen=True)
class Model:
    """Where a model comes from. `folder` None means random weights."""

    name: str
    config: ModelConfig
    folder: Path | None
    tokenizer_folder: Path


def find_model(name: str) -> Model:
    """`demo`, `dummy:<preset>` or a folder written by convert or published on a hub."""
    if name.startswith("dummy:"):
        return Model(name, preset(name.removeprefix("dummy:")), None, MODEL_FOLDER)
    folder = MODEL_FOLDER if name == "demo" else Path(name)
    require(folder.is_dir(), "model", name, "demo, dummy:<preset> or an existing folder")
    label = name if name == "demo" else folder.resolve().name
    return Model(label, model_config(read_hf_config(folder)), folder, folder)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The flags that were given; defaults are EngineConfig's."""
    given = {f.name: getattr(args, f.name, None) for f in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def build_engine(args: argparse.Namespace) -> Engine:
    """Load `args.model`, compile every bucket, and return an engine that is ready to serve."""
    return create_engine(args.model, engine_config(args))


def create_engine(name: str, engine: EngineConfig, *, warm_up: bool = True) -> Engine:
    model = find_model(name)
    set_compilation_cache(engine.compilation_cache)
    config = model.config.for_tensor_parallel(engine.tp)
    mesh = make_mesh(engine.tp)
    dtype = jnp.dtype(engine.dtype or _default_dtype(mesh))
    given = engine.max_context is None or engine.max_context <= config.max_context
    require(given, "max_context", engine.max_context, f"at most the model's {config.max_context}")
    context = min(engine.max_context or DEFAULT_CONTEXT, config.max_context)
    check_memory(config, engine, dtype, context)  # before minutes of loading
    params = _load(model, config, mesh, dtype)
    pages, slots = size_pools(config, engine, mesh, dtype, context)
    tokenizer = _tokenizer(model.tokenizer_folder)
    runner = ModelRunner(
        params,
        config,
        mesh,
        make_buckets(
            engine.max_prefill_tokens,
            engine.max_running,
            engine.checkpoint_interval,
            -(-context // engine.page_size),
        ),
        pages=pages,
        page_size=engine.page_size,
        slots=slots,
        max_running=engine.max_running,
        valid_vocab=min(len(tokenizer), config.vocab_size),
        dtype=dtype,
    )
    if warm_up:
        steps = tqdm(runner.warm_up(), total=runner.warm_up_steps(), desc="compiling", unit="step")
        for done in steps:
            steps.set_postfix_str(done)
    facts = {
        "model": model.name,
        "dtype": dtype.name,
        "max_context": context,
        "tp": engine.tp,
        "devices": [str(device) for device in mesh.devices.flat],
        "recovery": engine.recovery,
        "checkpoint_interval": engine.checkpoint_interval,
        "page_size": engine.page_size,
        "versions": versions(),
    }
    return Engine(
        runner,
        CacheManager(pages, engine.page_size, slots, engine.checkpoint_interval),
        tokenizer,
        engine,
        max_context=context,
        eos=_eos(model.tokenizer_folder, tokenizer),
        model_name=model.name,
        facts=facts,
    )


def set_compilation_cache(folder: str | None) -> None:
    """Keep compiled steps on disk, so that a second start need not compile."""
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "jhybrid" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def check_memory(config: ModelConfig, engine: EngineConfig, dtype: Any, context: int) -> None:
    """Refuse memory flags that are too small: ValueError names the flag and what it needs."""
    page_bytes, slot_bytes = _unit_bytes(config, engine.page_size, dtype)
    least = page_bytes * -(-context // engine.page_size)
    kv, state = engine.kv_memory, engine.state_memory
    enough = kv is None or kv >= least
    require(enough, "kv_memory", kv, f"at least {least} bytes for one request of {context} tokens")
    enough = state is None or state >= slot_bytes
    require(enough, "state_memory", state, f"at least {slot_bytes} bytes for one state")


def size_pools(
    config: ModelConfig, engine: EngineConfig, mesh: Mesh, dtype: Any, context: int
) -> tuple[int, int]:
    """Pages and slots that the memory flags (or the device's free memory) pay for.

    The pool of pages holds at least one request of the longest context, or it is a ValueError.
    """
    page_bytes, slot_bytes = _unit_bytes(config, engine.page_size, dtype)
    free = _free_bytes(mesh)
    left = max(0, free - GPU_WORKSPACE) if free is not None else 0
    kv = engine.kv_memory or (int(left * (1 - STATE_SHARE)) if free is not None else CPU_POOL)
    state = engine.state_memory or (int(left * STATE_SHARE) if free is not None else CPU_POOL)
    check_memory(config, replace(engine, kv_memory=kv, state_memory=state), dtype, context)
    pages, slots = kv // page_bytes, state // slot_bytes
    if engine.kv_memory is None:  # four times what all requests can fill is more than enough
        pages = min(pages, 4 * engine.max_running * -(-context // engine.page_size))
    log.info(
        "KV: %d pages of %d tokens, %.2f GiB; states: %d slots of %.2f MiB, %.2f GiB",
        pages,
        engine.page_size,
        pages * page_bytes / 2**30,
        slots,
        slot_bytes / 2**20,
        slots * slot_bytes / 2**30,
    )
    return pages, slots


def _unit_bytes(config: ModelConfig, page_size: int, dtype: Any) -> tuple[int, int]:
    """Bytes of one page and of one slot, over all ranks."""
    one = cache_specs(config, 1, page_size, 1)
    page = count_bytes([one.keys, one.values], dtype)
    return page, count_bytes([one.recurrent, one.conv], dtype)


def versions() -> dict[str, str]:
    names = ("jhybrid", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # running from a checkout
            continue
    return found


def _default_dtype(mesh: Mesh) -> str:
    """bfloat16 where the hardware multiplies it; the CPU is faster and exact in float32."""
    return "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"


def _load(model: Model, config: ModelConfig, mesh: Mesh, dtype: Any) -> ModelParams:
    if model.folder is None:
        return init_params(model_specs(config), jax.random.key(0), dtype, mesh)
    return load(model.folder, config, mesh, dtype)


def _free_bytes(mesh: Mesh) -> int | None:
    """Free bytes over all ranks of the mesh, or None where the device does not say."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(s is None or "bytes_limit" not in s for s in stats):
        return None
    free = [int(s["bytes_limit"] * GPU_SHARE) - s["bytes_in_use"] for s in stats]
    return min(free) * len(free)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # slow to import, and only engines need it

    with tempfile.TemporaryDirectory() as made:  # of a published folder that has rank files only
        if write_tokenizer(folder, Path(made)):
            for template in folder.glob("*.jinja"):
                shutil.copyfile(template, Path(made) / template.name)
            folder = Path(made)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _eos(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the generation config, else the tokenizer's."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
