"""The trained model as a Hugging Face folder: `Qwen3_5ForCausalLM`, loadable by transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ..config import ModelConfig
from ..layers.gated_attention import GatedAttentionParams
from ..layers.gated_delta_net import GatedDeltaNetParams
from ..models.hybrid import ModelParams
from .model import cast
from .tokenizer import write_json, write_tokenizer

Tensors = dict[str, np.ndarray]


def write_folder(folder: Path, hf_config: dict[str, Any]) -> None:
    """Everything but the weights: config and tokenizer files."""
    write_tokenizer(folder)
    write_json(folder / "config.json", hf_config)


def write_weights(
    folder: Path, params: ModelParams, config: ModelConfig, dtype: Any = ml_dtypes.bfloat16
) -> None:
    """model.safetensors, replaced as a whole: a kill leaves the old or the new one."""
    tensors = hf_tensors(params, config)
    packed = {name: x.astype(dtype if x.ndim > 1 else np.float32) for name, x in tensors.items()}
    temporary = folder / "model.safetensors.tmp"
    save_file(packed, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")


def rounded(params: ModelParams, config: ModelConfig) -> ModelParams:
    """Float32 parameters with the values that the bfloat16 file holds."""
    return cast(cast(params, config, jnp.bfloat16), config, jnp.float32)


def hf_tensors(params: ModelParams, config: ModelConfig) -> Tensors:
    """The published tensors, float32, each contiguous."""
    tensors: Tensors = {
        "model.embed_tokens.weight": _array(params.embedding),
        "model.norm.weight": _array(params.norm) - 1,
    }
    for index, layer in enumerate(params.layers):
        if isinstance(layer.mixer, GatedDeltaNetParams):
            parts = _linear_attention(layer.mixer, config)
        else:
            parts = _full_attention(layer.mixer)
        gate, up = _array(layer.ffn.gate_up)
        parts |= {
            # ours are plain multipliers, the published ones are added to 1
            "input_layernorm.weight": _array(layer.mixer_norm) - 1,
            "post_attention_layernorm.weight": _array(layer.ffn_norm) - 1,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": _array(layer.ffn.down),
        }
        tensors |= {f"model.layers.{index}.{name}": x for name, x in parts.items()}
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def _linear_attention(mixer: GatedDeltaNetParams, config: ModelConfig) -> Tensors:
    """Ours lie by key head (q | k | its v | its z); published: all q, all k, all v, and z apart."""
    linear = config.linear
    key, width = linear.key_dim, linear.conv_width
    qkvz, conv = _array(mixer.qkvz), _array(mixer.conv)

    def by_kind(x: np.ndarray) -> np.ndarray:
        parts = x[:, :key], x[:, key : 2 * key], x[:, 2 * key : width]
        return np.concatenate([_rows(part) for part in parts])

    beta, decay = _array(mixer.ba)
    out = _array(mixer.out)
    return {
        "linear_attn.in_proj_qkv.weight": by_kind(qkvz),
        "linear_attn.in_proj_z.weight": _rows(qkvz[:, width:]),
        "linear_attn.in_proj_b.weight": _rows(beta),
        "linear_attn.in_proj_a.weight": _rows(decay),
        "linear_attn.conv1d.weight": by_kind(conv)[:, None, :],
        "linear_attn.A_log": _array(mixer.A_log).ravel(),
        "linear_attn.dt_bias": _array(mixer.dt_bias).ravel(),
        "linear_attn.norm.weight": _array(mixer.norm),
        "linear_attn.out_proj.weight": out.reshape(len(out), -1),
    }


def _full_attention(mixer: GatedAttentionParams) -> Tensors:
    out, query = _array(mixer.out), _array(mixer.q)
    return {
        "self_attn.q_proj.weight": query.reshape(-1, query.shape[-1]),
        "self_attn.k_proj.weight": _rows(_array(mixer.k)),
        "self_attn.v_proj.weight": _rows(_array(mixer.v)),
        "self_attn.q_norm.weight": _array(mixer.q_norm) - 1,
        "self_attn.k_norm.weight": _array(mixer.k_norm) - 1,
        "self_attn.o_proj.weight": out.reshape(len(out), -1),
    }


def _array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def _rows(x: np.ndarray) -> np.ndarray:
    """The first two axes as one: heads times what each has."""
    return x.reshape(-1, *x.shape[2:])
