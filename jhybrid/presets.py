"""Published model sizes by name, for random weights at true size (`dummy:<name>`)."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig, require
from .hf_config import model_config

_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3.5-4b": {
        **_QWEN3_5,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3.6-27b": {
        **_QWEN3_5,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
}


def preset(name: str) -> ModelConfig:
    """The configuration of a preset. ValueError lists the names."""
    require(name in PRESETS, "dummy", name, f"one of {', '.join(PRESETS)}")
    return model_config(PRESETS[name])
