"""Tiny random OLMo-Hybrid checkpoints, made with transformers (needs torch)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.hf_fixtures import Case, randomise

CASES = (
    Case("olmo", family="olmo_hybrid"),
    Case(
        "olmo_rope_thirds_not_whole",  # 5 (8 + 8 + 16) channels are not three equal parts
        {
            "hidden_size": 40,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "linear_num_key_heads": 5,
            "linear_num_value_heads": 5,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
            "rms_norm_eps": 1e-5,
        },
        family="olmo_hybrid",
        seed=1,
    ),
    Case(
        "olmo_irregular",
        {
            "num_attention_heads": 4,
            "hidden_size": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 12,
            "num_hidden_layers": 2,  # no full_attention by the pattern: the last layer is
            "linear_allow_neg_eigval": False,
            "tie_word_embeddings": True,
        },
        family="olmo_hybrid",
        seed=2,
    ),
)


def text_config(case: Case) -> dict[str, Any]:
    return {
        "vocab_size": 96,
        "hidden_size": 60,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "linear_key_head_dim": 32,  # narrower keys are nearly parallel: rounding is amplified
        "linear_value_head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **case.text,
    }


def make_checkpoint(folder: Path, case: Case) -> Path:
    """Write the checkpoint of a case as save_pretrained does: its convolution in equal parts."""
    import torch
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    torch.manual_seed(case.seed)
    model = OlmoHybridForCausalLM(OlmoHybridConfig.from_dict(text_config(case)))
    randomise(model)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder)
    return folder


def layouts(src: Path) -> dict[str, dict[str, np.ndarray]]:
    """The hub's names with the convolution cut where its parts end; and an exporter's names."""
    tensors = load_file(src / "model.safetensors")
    config = json.loads((src / "config.json").read_text())
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    hub, other = {}, {}
    for name, x in tensors.items():
        if "_conv1d" not in name:
            name = name.replace("attention_layer_norm", "input_layernorm")
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
            hub[name] = x
            name = name.replace("linear_attn.o_proj", "linear_attn.out_proj")
            name = name.replace("o_norm", "norm").replace(".mlp.", ".block_sparse_moe.")
            other[f"model.language_{name}" if name.startswith("model.") else name] = x
        elif "q_conv1d" in name:
            parts = [tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"]
            whole = np.concatenate(parts)
            for part, cut in zip("qkv", np.split(whole, [keys, 2 * keys]), strict=True):
                hub[name.replace("q_conv1d", f"{part}_conv1d")] = np.ascontiguousarray(cut)
            other["model.language_" + name.replace("q_conv1d", "conv1d")] = whole
    return {"hub": hub, "other": other}
