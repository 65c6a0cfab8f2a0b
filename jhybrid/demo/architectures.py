"""The two models that are trained here, as config.json of the published layouts they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..hf_config import model_config
from .tokenizer import END_OF_TEXT, IM_END, MAX_CONTEXT, VOCAB_SIZE

KINDS = {"L": "linear_attention", "F": "full_attention"}


@dataclass(frozen=True)
class Architecture:
    """Sizes that both have. `pattern` names each layer: L linear, F full attention."""

    pattern: str
    hidden: int
    mlp: int
    heads: int  # of full attention
    linear_heads: int  # key heads of a linear layer
    key_dim: int  # of a linear layer's head

    def hf_config(self) -> dict[str, Any]:
        raise NotImplementedError

    def model_config(self) -> ModelConfig:
        return model_config(self.hf_config())

    def _common(self) -> dict[str, Any]:
        return {
            "dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": len(self.pattern),
            "num_attention_heads": self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": IM_END,
            "pad_token_id": END_OF_TEXT,
        }


@dataclass(frozen=True)
class GatedDeltaNet(Architecture):
    """Gated DeltaNet beside gated attention: a text-only Qwen3.5, but without rotation.

    With it attention learns which of several values came last, even where training cuts it off
    from them nine times in ten, and order is not left to the states.
    """

    kv_heads: int
    head_dim: int  # of full attention
    value_heads: int
    value_dim: int

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **self._common(),
            "layer_types": [KINDS[letter] for letter in self.pattern],
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.linear_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": 4,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.0,
                "mrope_interleaved": True,
                "mrope_section": [0, 0, 0],
            },
            "max_position_embeddings": MAX_CONTEXT,
        }


@dataclass(frozen=True)
class KimiLinear(Architecture):
    """Kimi Delta Attention beside latent attention without rotation, dense blocks: Kimi-Linear."""

    latent_dim: int
    nope_dim: int
    shared_dim: int
    value_dim: int  # of full attention

    def hf_config(self) -> dict[str, Any]:
        layers = {kind: [i for i, x in enumerate(self.pattern, 1) if x == kind] for kind in "LF"}
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            **self._common(),
            "num_key_value_heads": self.heads,
            "linear_attn_config": {
                "num_heads": self.linear_heads,
                "head_dim": self.key_dim,
                "short_conv_kernel_size": 4,
                "kda_layers": layers["L"],
                "full_attn_layers": layers["F"],
            },
            "mla_use_nope": True,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent_dim,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.shared_dim,
            "v_head_dim": self.value_dim,
            "num_experts": None,
            "mlp_layer_types": ["dense"] * len(self.pattern),
            "model_max_length": MAX_CONTEXT,
        }
