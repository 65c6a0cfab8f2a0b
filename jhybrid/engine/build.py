"""From flags to a warm engine: find the model, size the pools, load, compile."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from pallas_kernels.triton import use_pallas

from ..cache.cache_manager import CacheManager
from ..config import ModelConfig, require
from ..demo import MODEL_FOLDER, MODELS
from ..hf_config import model_config, read_hf_config
from ..models.specs import ModelParams, model_specs
from ..params import init_params
from ..presets import preset
from ..sharding import make_mesh
from ..tokenizer.tiktoken import write_tokenizer
from ..weights import load
from .buckets import make_buckets, table_pages
from .compression import compress
from .config import EngineConfig, flag, flags_for_requests, idle_flags
from .engine import Engine
from .memory import check_memory, host_store, input_dtype, input_policy, size_pools
from .model_runner import ModelRunner, whole_prompt_pays
from .warm_up import warm_up, warm_up_steps

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 32768


@dataclass(frozen=True)
class Model:
    """Where a model comes from. `folder` None means random weights."""

    name: str
    config: ModelConfig
    folder: Path | None
    tokenizer_folder: Path


def find_model(name: str) -> Model:
    """`demo`, `demo-kda`, `dummy:<preset>` or a folder written by convert or published on a hub."""
    if name.startswith("dummy:"):
        return Model(name, preset(name.removeprefix("dummy:")), None, MODEL_FOLDER)
    folder = MODELS.get(name, Path(name))
    known = "demo, demo-kda, dummy:<preset> or an existing folder"
    require(folder.is_dir(), "model", name, known)
    label = name if name in MODELS else folder.resolve().name
    return Model(label, model_config(read_hf_config(folder)), folder, folder)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The flags that were given; defaults are EngineConfig's."""
    given = {f.name: getattr(args, f.name, None) for f in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def warn_unread(args: argparse.Namespace, read: Collection[str]) -> None:
    """For programs that load a model and no engine: say which of the engine's flags they ignore."""
    for f in fields(EngineConfig):
        value = getattr(args, f.name, None)
        if f.name not in read and value not in (None, f.default):
            log.warning("%s has no effect here: there is no engine", flag(f.name, value))


def build_engine(args: argparse.Namespace) -> Engine:
    """Load `args.model`, compile every bucket, and return an engine that is ready to serve."""
    return create_engine(args.model, engine_config(args))


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on its devices, without an engine. `config` is for its tensor parallel ranks;
    `eos` are the tokens that end a text, `valid_vocab` how many tokens the tokenizer knows."""

    name: str
    config: ModelConfig
    mesh: Mesh
    dtype: Any
    params: ModelParams
    tokenizer: Any
    eos: frozenset[int]
    valid_vocab: int


def load_model(name: str, engine: EngineConfig) -> LoadedModel:
    """Only the flags of the model are read: tp, dtype and the compilation cache."""
    model, mesh = find_model(name), make_mesh(engine.tp)
    set_compilation_cache(engine.compilation_cache)
    config, dtype = model.config.for_tensor_parallel(engine.tp), _dtype(engine, mesh)
    tokenizer = _tokenizer(model.tokenizer_folder)
    return LoadedModel(
        name=model.name,
        config=config,
        mesh=mesh,
        dtype=dtype,
        params=_load(model, config, mesh, dtype),
        tokenizer=tokenizer,
        eos=_eos(model.tokenizer_folder, tokenizer),
        valid_vocab=min(len(tokenizer), config.vocab_size),
    )


def create_engine(name: str, engine: EngineConfig, *, warm_up: bool = True) -> Engine:
    for message in idle_flags(engine):
        log.warning(message)
    for message in flags_for_requests(engine):
        log.info(message)
    model = find_model(name)
    set_compilation_cache(engine.compilation_cache)
    config = model.config.for_tensor_parallel(engine.tp)
    mesh = make_mesh(engine.tp)
    dtype = _dtype(engine, mesh)
    given = engine.max_context is None or engine.max_context <= config.max_context
    require(given, "max_context", engine.max_context, f"at most the model's {config.max_context}")
    context = min(engine.max_context or DEFAULT_CONTEXT, config.max_context)
    check_memory(config, engine, dtype, context)  # before minutes of loading
    params = _load(model, config, mesh, dtype)
    params, compression = compress(params, config, engine, dtype, model.folder)
    sizes = size_pools(config, engine, mesh, dtype, context, compression)
    tokenizer = _tokenizer(model.tokenizer_folder)
    pages = table_pages(context, engine.page_size)
    room = pages * engine.page_size
    alone = room if whole_prompt_pays(config, room, room, dtype) else 0
    runner = ModelRunner(
        params,
        config,
        mesh,
        make_buckets(
            engine.max_prefill_tokens,
            engine.max_running,
            engine.checkpoint_interval,
            pages,
            longest_alone=alone,
            single=use_pallas(None),
        ),
        pages=sizes.pages,
        page_size=engine.page_size,
        slots=sizes.native_slots,
        max_running=engine.max_running,
        valid_vocab=min(len(tokenizer), config.vocab_size),
        dtype=dtype,
        compression=compression,
        compressed_slots=sizes.compressed_slots,
        input_pages=sizes.input_pages,
        input_dtype=input_dtype(engine),
        host=engine.host_memory is not None,
    )
    if warm_up:
        _warm_up(runner)
    facts = {
        "model": model.name,
        "dtype": dtype.name,
        "max_context": context,
        "tp": engine.tp,
        "devices": [str(device) for device in mesh.devices.flat],
        "recovery": engine.recovery,
        "w_max": engine.w_max,
        "checkpoint_dtype": engine.checkpoint_dtype,
        "layout": engine.layout,
        "placement": engine.placement,
        "replay_ratio": engine.replay_ratio,
        "group_inputs": engine.group_inputs,
        "group_input_dtype": engine.group_input_dtype,
        "plan": compression.facts if compression else None,
        "checkpoint_interval": engine.checkpoint_interval,
        "page_size": engine.page_size,
        "versions": versions(),
    }
    return Engine(
        runner,
        CacheManager(
            sizes.pages,
            engine.page_size,
            sizes.native_slots,
            engine.checkpoint_interval,
            compressed_slots=sizes.compressed_slots,
            lossless=compression is not None and compression.lossless,
            watermark=sizes.watermark,
            inputs=input_policy(engine, sizes.input_pages),
            host=host_store(config, engine, dtype),
        ),
        tokenizer,
        engine,
        max_context=context,
        eos=_eos(model.tokenizer_folder, tokenizer),
        model_name=model.name,
        transfers=sizes.transfers,
        facts=facts,
    )


def _warm_up(runner: ModelRunner) -> None:
    steps = tqdm(warm_up(runner), total=warm_up_steps(runner), desc="compiling", unit="step")
    for done in steps:
        steps.set_postfix_str(done)


def set_compilation_cache(folder: str | None) -> None:
    """Keep compiled steps on disk, so that a second start need not compile."""
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "jhybrid" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def versions() -> dict[str, str]:
    names = ("jhybrid", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # running from a checkout
            continue
    return found


def _dtype(engine: EngineConfig, mesh: Mesh) -> Any:
    """bfloat16 where the hardware multiplies it; the CPU is faster and exact in float32."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    wanted = "float32 on a CPU, whose XLA has not all of the products that bfloat16 needs"
    require(not on_cpu or engine.dtype != "bfloat16", "dtype", engine.dtype, wanted)
    return jnp.dtype(engine.dtype or ("float32" if on_cpu else "bfloat16"))


def _load(model: Model, config: ModelConfig, mesh: Mesh, dtype: Any) -> ModelParams:
    if model.folder is None:
        return init_params(model_specs(config), jax.random.key(0), dtype, mesh)
    return load(model.folder, config, mesh, dtype)


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
