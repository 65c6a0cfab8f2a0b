"""Random Hugging Face checkpoints of any size, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jhybrid.convert.families import family_of
from jhybrid.hf_config import model_config

TINY: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": False,
}


def published_tensors(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published layout."""
    table = family_of(hf_config)(model_config(hf_config), ())
    return {source.name: source.shape for rule in table.rules for source in rule.sources}


def write_hf(folder: Path, hf_config: dict[str, Any], shards: int = 1, seed: int = 0) -> Path:
    """A float32 checkpoint in `shards` files (one shard in memory at a time)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(1 << 16, np.float32) * np.float32(0.08)
    shapes = published_tensors(hf_config)
    weight_map = {}
    for number in range(shards):
        names = list(shapes)[number::shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        file = "model.safetensors" if shards == 1 else file
        tensors = {name: np.resize(np.roll(noise, len(name)), shapes[name]) for name in names}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
