"""Tiny random Kimi-K3 checkpoints in the published layout, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 9,
        "intermediate_size": 80,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 9],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "num_heads": 4,
            "head_dim": 32,  # narrower keys are nearly parallel: rounding is amplified
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
    "vision_config": {"vt_hidden_size": 8},
}


def make_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of CONFIG's model under its published name, and two that only images need."""
    rng = np.random.default_rng(seed)
    c, out = CONFIG["text_config"], {}
    linear, hidden, rank = c["linear_attn_config"], c["hidden_size"], c["q_lora_rank"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    rows, latent = heads * dim, c["routed_expert_hidden_size"]
    own, shared, width = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    inner, wide = c["moe_intermediate_size"], c["intermediate_size"]

    def weight(name: str, *shape: int, size: float = 0.1, dtype: np.dtype = BFLOAT16) -> None:
        out[name] = (size * rng.standard_normal(shape)).astype(dtype)

    def norm(name: str, size: int, dtype: np.dtype = BFLOAT16) -> None:
        out[name] = (1 + 0.1 * rng.standard_normal(size)).astype(dtype)

    def mlp(name: str, width: int) -> None:
        weight(name + "gate_proj.weight", width, hidden)
        weight(name + "up_proj.weight", width, hidden)
        weight(name + "down_proj.weight", hidden, width)

    def packed(name: str, rows: int, columns: int) -> None:
        values = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        out[name + "weight_packed"] = values
        out[name + "weight_scale"] = rng.integers(121, 124, (rows, columns // 32), np.uint8)

    def delta(p: str) -> None:
        for letter in "qkv":
            weight(f"{p}{letter}_proj.weight", rows, hidden)
            weight(f"{p}{letter}_conv1d.weight", rows, 1, 4, size=0.5, dtype=np.dtype(np.float32))
        weight(p + "g_proj.weight", rows, hidden)
        weight(p + "o_proj.weight", hidden, rows)
        weight(p + "f_a_proj.weight", dim, hidden)
        weight(p + "f_b_proj.weight", rows, dim)
        weight(p + "b_proj.weight", heads, hidden)
        A_log = np.zeros(128, np.float32)
        A_log[:heads] = 0.3 * rng.standard_normal(heads)
        out[p + "A_log"] = A_log
        out[p + "dt_bias"] = (rng.standard_normal(rows) - 2).astype(np.float32)
        norm(p + "o_norm.weight", dim, np.dtype(np.float32))

    def full(p: str) -> None:
        n = c["num_attention_heads"]
        weight(p + "q_a_proj.weight", rank, hidden)
        norm(p + "q_a_layernorm.weight", rank)
        weight(p + "q_b_proj.weight", n * (own + shared), rank)
        weight(p + "kv_a_proj_with_mqa.weight", c["kv_lora_rank"] + shared, hidden)
        norm(p + "kv_a_layernorm.weight", c["kv_lora_rank"])
        weight(p + "kv_b_proj.weight", n * (own + width), c["kv_lora_rank"])
        weight(p + "g_proj.weight", n * width, hidden)
        weight(p + "o_proj.weight", hidden, n * width)

    def experts(p: str) -> None:
        weight(p + "gate.weight", c["num_experts"], hidden)
        name = p + "gate.e_score_correction_bias"
        weight(name, c["num_experts"], size=0.05, dtype=np.dtype(np.float32))
        weight(p + "routed_expert_down_proj.weight", latent, hidden)
        weight(p + "routed_expert_up_proj.weight", hidden, latent)
        norm(p + "routed_expert_norm.weight", latent)
        mlp(p + "shared_experts.", c["num_shared_experts"] * inner)
        for e in range(c["num_experts"]):
            packed(f"{p}experts.{e}.w1.", inner, latent)
            packed(f"{p}experts.{e}.w3.", inner, latent)
            packed(f"{p}experts.{e}.w2.", latent, inner)

    def mix(p: str) -> None:
        norm(p + "_norm.weight", hidden)
        weight(p + "_proj.weight", 1, hidden, size=0.3)

    model = "language_model.model."
    weight(model + "embed_tokens.weight", c["vocab_size"], hidden, size=1.0)
    weight("language_model.lm_head.weight", c["vocab_size"], hidden)
    norm(model + "norm.weight", hidden)
    mix(model + "output_attn_res")
    for i in range(c["num_hidden_layers"]):
        p = f"{model}layers.{i}."
        norm(p + "input_layernorm.weight", hidden)
        norm(p + "post_attention_layernorm.weight", hidden)
        mix(p + "self_attention_res")
        mix(p + "mlp_res")
        (full if i + 1 in linear["full_attn_layers"] else delta)(p + "self_attn.")
        if i < c["first_k_dense_replace"]:
            mlp(p + "mlp.", wide)
        else:
            experts(p + "block_sparse_moe.")
    weight("vision_tower.patch_embed.proj.weight", 8, 3, 2, 2)
    weight("mm_projector.proj.0.weight", 8, 8)
    return out


def write(
    folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder
