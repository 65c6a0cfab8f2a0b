"""Tiny random Qwen3-Next and Qwen3.5 MoE checkpoints, made with transformers (needs torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.hf_fixtures import ODD, Case, add_mtp, heads, randomise, text_config, vision_parts

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ODD_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,  # transformers needs multiples of 4
    "shared_expert_intermediate_size": 13,
}


def _layers(letters: str) -> dict[str, Any]:
    """l for linear attention, f for full attention; few layers, for compile time."""
    kinds = {"l": "linear_attention", "f": "full_attention"}
    return {"num_hidden_layers": len(letters), "layer_types": [kinds[x] for x in letters]}


NEXT_CASES = (
    Case("next", EXPERTS | heads(2, 4, 4, 2), family="qwen3_next"),  # the 3:1 pattern
    Case(
        "next_odd_sizes",
        ODD | ODD_EXPERTS | heads(1, 4, 6, 3) | _layers("lf") | {"norm_topk_prob": False},
        family="qwen3_next",
        seed=1,
    ),
    Case(
        "next_some_dense",
        EXPERTS
        | heads(4, 4, 8, 4)
        | _layers("flf")
        | {
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            "tie_word_embeddings": True,
        },
        family="qwen3_next",
        seed=2,
    ),
)
MOE_CASES = (
    Case("moe_text", EXPERTS | heads(4, 8, 4, 2) | _layers("lf"), family="qwen3_5_moe"),
    Case(
        "moe_odd_sizes",
        ODD | ODD_EXPERTS | heads(2, 6, 6, 3) | _layers("fl"),
        family="qwen3_5_moe",
        seed=1,
    ),
    Case(
        "moe_multimodal_mtp",
        EXPERTS | heads(2, 4, 4, 2) | _layers("llf") | {"tie_word_embeddings": True},
        family="qwen3_5_moe",
        multimodal=True,
        mtp=True,
        shard_size="400KB",
        seed=2,
    ),
)
CASES = NEXT_CASES + MOE_CASES


def make_checkpoint(folder: Path, case: Case) -> Path:
    """Write the checkpoint of a case: experts one by one, as save_pretrained does."""
    import torch
    import transformers as hf

    torch.manual_seed(case.seed)
    text = text_config(case)
    if case.family == "qwen3_next":
        rope = text["rope_parameters"]
        text["rope_parameters"] = {k: v for k, v in rope.items() if not k.startswith("mrope")}
        model: Any = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig.from_dict(text))
    elif case.multimodal:
        config = hf.Qwen3_5MoeConfig.from_dict(vision_parts(text))
        model = hf.Qwen3_5MoeForConditionalGeneration(config)
    else:
        model = hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig.from_dict(text))
    randomise(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.mul_(8)  # as steep as a trained router: no near ties
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard_size)
    if case.mtp:
        add_mtp(folder)
    return folder


def fused_experts(src: Path) -> dict[str, np.ndarray]:
    """The same tensors with the experts of each layer in two, gate rows before up rows."""
    out: dict[str, np.ndarray] = {}
    for file in sorted(src.glob("*.safetensors")):
        out |= load_file(file)
    for prefix in sorted({n.split("experts.0.")[0] for n in out if ".experts.0." in n}):
        count = sum(n.startswith(prefix + "experts.") and "up_proj" in n for n in out)
        gate, up, down = (
            np.stack([out.pop(f"{prefix}experts.{e}.{x}_proj.weight") for e in range(count)])
            for x in ("gate", "up", "down")
        )
        out[prefix + "experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[prefix + "experts.down_proj"] = down
    return out


def layouts(src: Path) -> dict[str, dict[str, np.ndarray]]:
    """The other ways these weights may be published."""
    return {"fused": fused_experts(src)}
