"""Published model sizes by name, for random weights at true size (`dummy:<name>`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config import ModelConfig, require
from .hf_config import model_config
from .horizons import QWEN3_NEXT, HorizonDistribution

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

_QWEN_MOE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
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
    "qwen3.5-35b-a3b": {
        **_QWEN3_5,
        **_QWEN_MOE,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "qwen3-next-80b": {
        **_QWEN3_5,
        **_QWEN_MOE,
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "olmo-hybrid-7b": {
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "num_attention_heads": 30,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "rope_parameters": {"rope_theta": None},
        "max_position_embeddings": 65536,
    },
}

# Of the Gated DeltaNet models only Qwen3-Next's horizons are published; the others borrow them.
HORIZONS: dict[str, HorizonDistribution] = dict.fromkeys(PRESETS, QWEN3_NEXT)


def preset(name: str) -> ModelConfig:
    """The configuration of a preset. ValueError lists the names."""
    require(name in PRESETS, "dummy", name, f"one of {', '.join(PRESETS)}")
    config = model_config(PRESETS[name])
    return replace(config, linear=replace(config.linear, horizons=HORIZONS[name]))
