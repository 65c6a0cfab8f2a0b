"""Hugging Face `config.json` -> ModelConfig, one reader per published `model_type`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .config import (
    AttentionConfig,
    LayerConfig,
    LinearAttentionConfig,
    ModelConfig,
    require,
)
from .hf_fields import HfConfig, get
from .hf_kimi import kimi


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


def _layer_types(config: HfConfig, count: int) -> list[str]:
    """The explicit `layer_types`, or the pattern of `full_attention_interval`."""
    types = config.get("layer_types")
    if types is None:
        every = get(config, "full_attention_interval", int, 4)
        types = [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
        ]
    require(len(types) == count, "layer_types", types, f"a list of {count} entries")
    known = {"linear_attention", "full_attention"}
    require(set(types) <= known, "layer_types", types, f"only {sorted(known)}")
    return list(types)


def _qwen3_5(config: HfConfig) -> ModelConfig:
    """Qwen3.5 and Qwen3.6 dense: the text part of a multimodal config, or the text-only form."""
    text: HfConfig = config.get("text_config") or config
    count = get(text, "num_hidden_layers", int)
    types = _layer_types(text, count)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    theta = rope.get("rope_theta", text.get("rope_theta", 1e7))
    head_dim = get(text, "head_dim", int, 256)
    eps = get(text, "rms_norm_eps", (int, float), 1e-6)
    require(not text.get("attention_bias"), "attention_bias", text.get("attention_bias"), "false")
    tie = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return ModelConfig(
        family="qwen3_5",
        vocab_size=get(text, "vocab_size", int),
        hidden_size=get(text, "hidden_size", int),
        layers=tuple(
            LayerConfig("linear" if kind == "linear_attention" else "full") for kind in types
        ),
        linear=LinearAttentionConfig(
            kind="gdn",
            key_heads=get(text, "linear_num_key_heads", int, 16),
            value_heads=get(text, "linear_num_value_heads", int, 32),
            key_dim=get(text, "linear_key_head_dim", int, 128),
            value_dim=get(text, "linear_value_head_dim", int, 128),
            conv_size=get(text, "linear_conv_kernel_dim", int, 4),
            norm_eps=eps,
        ),
        full=AttentionConfig(
            heads=get(text, "num_attention_heads", int),
            kv_heads=get(text, "num_key_value_heads", int),
            head_dim=head_dim,
            rotary_dim=int(head_dim * factor),
            rope_theta=float(theta),
            output_gate=True,
            qk_norm="head",
        ),
        mlp_width=get(text, "intermediate_size", int),
        norm_eps=eps,
        tie_embeddings=bool(tie),
        max_context=get(text, "max_position_embeddings", int, 32768),
    )


READERS: dict[str, Callable[[HfConfig], ModelConfig]] = {
    "kimi_k3": kimi,
    "kimi_linear": kimi,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
}
