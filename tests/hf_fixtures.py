"""Tiny random Hugging Face checkpoints, made with transformers (needs torch)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One checkpoint: text config overrides and how it is written."""

    name: str
    text: dict[str, Any] = field(default_factory=dict)
    multimodal: bool = False
    mtp: bool = False
    dtype: str = "float32"
    shard_size: str = "1GB"
    seed: int = 0
    family: str = "qwen3_5"


def heads(key: int, value: int, query: int, kv: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": key,
        "linear_num_value_heads": value,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
    }


ODD = {
    "vocab_size": 97,
    "hidden_size": 52,
    "intermediate_size": 75,
    "linear_key_head_dim": 40,
    "linear_value_head_dim": 20,
}

CASES = (
    Case("text_tied", heads(2, 4, 4, 2) | {"tie_word_embeddings": True}),
    Case("text_untied", heads(2, 2, 4, 1)),
    Case("text_odd_sizes", heads(1, 4, 6, 3) | ODD),
    Case("vl_untied", heads(2, 4, 4, 2), multimodal=True),
    Case(
        "vl_tied_sharded_mtp",
        heads(2, 6, 4, 4) | {"tie_word_embeddings": True},
        multimodal=True,
        mtp=True,
        shard_size="200KB",
    ),
    Case(
        "text_irregular",
        heads(4, 4, 8, 2)
        | {
            "num_hidden_layers": 5,
            "layer_types": [f"{kind}_attention" for kind in "full linear linear full full".split()],
            "rms_norm_eps": 1e-5,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
    ),
    Case("text_bfloat16", heads(2, 4, 4, 2), dtype="bfloat16"),
)


def text_config(case: Case) -> dict[str, Any]:
    """The text config of a case: defaults of a tiny model, then its overrides."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_key_head_dim": 32,  # narrower keys are nearly parallel: rounding is amplified
        "linear_value_head_dim": 16,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rope_parameters": rope | {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        **case.text,
    }


def vision_parts(text: dict[str, Any]) -> dict[str, Any]:
    """The config of a multimodal folder around a text config."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    special = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": 10 + i for i, name in enumerate(special)}
    tie = text["tie_word_embeddings"]
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tie} | ids


def make_checkpoint(folder: Path, case: Case) -> Path:
    """Write the checkpoint of a case, with nothing left at a trivial initial value."""
    import torch
    from transformers import (
        Qwen3_5Config,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5TextConfig,
    )

    torch.manual_seed(case.seed)
    text = text_config(case)
    if case.multimodal:
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config.from_dict(vision_parts(text)))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig.from_dict(text))
    randomise(model)
    model = model.to(getattr(torch, case.dtype))
    model.save_pretrained(folder, max_shard_size=case.shard_size)
    if case.mtp:
        add_mtp(folder)
    return folder


def randomise(model: Any) -> None:
    """Leave nothing at a trivial initial value: wrong conventions would pass unseen."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            if weight.ndim > 1 and not name.endswith("A_log"):
                weight.copy_(0.08 * noise)
            else:
                weight.add_((0.5 if name.endswith("dt_bias") else 0.1) * noise)


def write_as(dst: Path, tensors: dict[str, np.ndarray], src: Path) -> Path:
    """A checkpoint of these tensors with the config of another."""
    from safetensors.numpy import save_file

    dst.mkdir()
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(src / "config.json", dst)
    return dst


def routing_gap(folder: Path, token_ids: np.ndarray) -> float:
    """The least distance in score of the last expert chosen from the first one not, of any token.

    Far above rounding, it says that no other implementation may choose otherwise. Infinite for a
    model without routers. Where groups are chosen first, the distance of groups counts as well.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    gaps = [float("inf")]

    def hook(router: Any, _: Any, output: Any) -> None:
        bias = getattr(router, "e_score_correction_bias", None)
        scores = output[0] if bias is None else output[0].sigmoid() + bias
        groups = getattr(router, "num_group", 1)
        if groups > 1:
            inside = scores.unflatten(-1, (groups, -1))
            sums = inside.topk(2, dim=-1).values.sum(-1)
            add(sums, router.topk_group)
            chosen = sums.topk(router.topk_group, dim=-1).indices
            scores = inside.take_along_dim(chosen[..., None], 1).flatten(1)
        add(scores, router.top_k)

    def add(scores: Any, count: int) -> None:
        best = scores.sort(dim=-1, descending=True).values
        gaps.append((best[:, count - 1] - best[:, count]).min().item())

    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(hook)
    with torch.no_grad():
        model(torch.from_numpy(token_ids.astype(np.int64)))
    return min(gaps)


def greedy(folder: Path, prompt: np.ndarray, count: int) -> list[int]:
    """The greedy continuation that transformers gives in float32, its end token ignored."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    return out[0, len(prompt) :].tolist()


def add_mtp(folder: Path) -> None:
    """A shard of multi-token prediction weights, as hub folders have and transformers ignores."""
    from safetensors.numpy import save_file

    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    tensors = {"mtp.fc.weight": np.ones((4, 8), np.float32), "mtp.norm.weight": np.ones(4)}
    save_file(tensors, folder / "mtp.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    index_file.write_text(json.dumps(index))
