"""Tiny random Kimi-Linear checkpoints, made with transformers (needs torch)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.hf_fixtures import Case, randomise


def _layers(mixers: str, **fields: int) -> dict[str, Any]:
    """`mixers` names every layer: k for Kimi Delta Attention, f for full attention."""
    lists = {
        name: [i + 1 for i, letter in enumerate(mixers) if letter == name[0]]
        for name in ("kda_layers", "full_attn_layers")
    }
    linear = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4, **lists, **fields}
    return {"linear_attn_config": linear, "num_hidden_layers": len(mixers)}


ODD = {
    "vocab_size": 97,
    "hidden_size": 52,
    "intermediate_size": 75,
    "moe_intermediate_size": 20,
    "num_attention_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 18,  # wider than the query
    "num_experts": 6,
    "num_experts_per_token": 3,
    "first_k_dense_replace": 2,
    "moe_renormalize": False,
    "routed_scaling_factor": 1.5,
}

CASES = (
    Case("direct_query", _layers("kkff"), seed=0),
    Case(
        "query_low_rank",
        _layers("fkf", num_heads=8, head_dim=24)
        | {
            "q_lora_rank": 24,
            "num_shared_experts": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "num_experts_per_token": 3,
        },
        seed=1,
    ),
    Case("odd_sizes", ODD | _layers("kfk", num_heads=5, short_conv_kernel_size=3), seed=2),
)

# Both kinds of layer and of block, for tests that compile many programs.
SMALL = Case("small", CASES[1].text | _layers("fk", num_heads=8, head_dim=24), seed=3)


def text_config(case: Case) -> dict[str, Any]:
    return {
        "model_type": "kimi_linear",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "model_max_length": 512,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **case.text,
    }


def make_checkpoint(folder: Path, case: Case) -> Path:
    """Write the checkpoint of a case as save_pretrained does."""
    import torch
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(case.seed)
    model = KimiLinearForCausalLM(KimiLinearConfig.from_dict(text_config(case)))
    randomise(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn(buffer.shape))
    model.to(getattr(torch, case.dtype)).save_pretrained(folder)
    return folder


def to_hub(src: Path, dst: Path, config: dict[str, Any]) -> Path:
    """The same weights as the hub has them: dense blocks under `mlp`, and the hub's config."""
    tensors = load_file(src / "model.safetensors")
    dense = {name.split("gate_proj")[0] for name in tensors if "_moe.gate_proj" in name}

    def rename(name: str) -> str:
        inside = any(name.startswith(prefix) for prefix in dense)
        return name.replace("block_sparse_moe", "mlp") if inside else name

    return _write(dst, {rename(name): x for name, x in tensors.items()}, config)


def to_memory(src: Path, dst: Path, config: dict[str, Any]) -> Path:
    """The same weights as transformers holds them: fused experts and convolution, nested gate."""
    out: dict[str, np.ndarray] = {}
    for name, x in load_file(src / "model.safetensors").items():
        name = name.replace("block_sparse_moe", "mlp")
        for part in ("A_log", "dt_bias", "f_a_proj", "f_b_proj"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        out[name] = x
    for name in [n for n in out if n.endswith("q_conv1d.weight")]:
        parts = [out.pop(name.replace("q_conv1d", f"{x}_conv1d")) for x in "qkv"]
        out[name.replace("q_conv1d", "conv1d")] = np.concatenate(parts)
    for prefix in {n.split("experts.0.")[0] for n in out if ".experts.0." in n}:
        count = sum(n.startswith(prefix + "experts.") and n.endswith("w1.weight") for n in out)
        w1, w2, w3 = (
            np.stack([out.pop(f"{prefix}experts.{e}.w{i}.weight") for e in range(count)])
            for i in (1, 2, 3)
        )
        out[prefix + "experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        out[prefix + "experts.down_proj"] = w2
    return _write(dst, out, config)


def _write(dst: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    dst.mkdir()
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    (dst / "config.json").write_text(json.dumps(config))
    return dst
