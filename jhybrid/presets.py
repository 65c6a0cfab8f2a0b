"""Published model sizes by name, for random weights at true size (`dummy:<name>`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config import ModelConfig, require
from .hf_config import model_config
from .horizons import KIMI_K3, KIMI_LINEAR, QWEN3_NEXT, HorizonDistribution

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

_KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "model_max_length": 1048576,
}


def kda_layers(count: int, full: list[int], heads: int, **fields: Any) -> dict[str, Any]:
    """The fields of a Kimi config that say which layers (counted from 1) are full attention."""
    linear = [i for i in range(1, count + 1) if i not in full]
    lists = {"full_attn_layers": full, "kda_layers": linear, "num_heads": heads, "head_dim": 128}
    return {"num_hidden_layers": count, "linear_attn_config": lists | fields}


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
    "kimi-linear-48b": {
        **_KIMI,
        **kda_layers(27, [4, 8, 12, 16, 20, 24, 27], heads=32),
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
    },
    # All widths are Kimi-K3's; 16 of its 93 layers (two residual blocks) and 32 of its 896 experts
    # make 56 GB of bfloat16.
    "kimi-k3-slice": {
        **_KIMI,
        **kda_layers(16, [4, 8, 12, 16], heads=96, gate_lower_bound=-5.0, use_full_rank_gate=True),
        "model_type": "kimi_k3",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "mla_use_output_gate": True,
        "num_experts": 32,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 3072,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "attn_res_block_size": 12,
    },
}

# Of the Gated DeltaNet models only Qwen3-Next's horizons are published; the others borrow them.
HORIZONS: dict[str, HorizonDistribution] = dict.fromkeys(PRESETS, QWEN3_NEXT) | {
    "kimi-linear-48b": KIMI_LINEAR,
    "kimi-k3-slice": KIMI_K3,
}


def preset(name: str) -> ModelConfig:
    """The configuration of a preset. ValueError lists the names."""
    require(name in PRESETS, "dummy", name, f"one of {', '.join(PRESETS)}")
    config = model_config(PRESETS[name])
    return replace(config, linear=replace(config.linear, horizons=HORIZONS[name]))
