"""Hugging Face `config.json` -> ModelConfig, one reader per published `model_type`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import ModelConfig, require
from .hf_fields import HfConfig
from .hf_kimi import kimi
from .hf_olmo import olmo_hybrid
from .hf_qwen import qwen3_5, qwen3_5_moe, qwen3_next


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder. Raises ValueError naming the file."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a checkpoint folder needs its config.json")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def model_config(config: HfConfig) -> ModelConfig:
    """The ModelConfig of a parsed config; dispatches on the outer `model_type`."""
    kind = config.get("model_type")
    reader = READERS.get(str(kind))
    require(reader is not None, "model_type", kind, f"one of {sorted(READERS)}")
    assert reader is not None
    return reader(config)


READERS: dict[str, Callable[[HfConfig], ModelConfig]] = {
    "kimi_k3": kimi,
    "kimi_linear": kimi,
    "olmo_hybrid": olmo_hybrid,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
}
