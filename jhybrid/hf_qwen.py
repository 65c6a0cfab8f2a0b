"""Qwen3-Next's, Qwen3.5's and Qwen3.6's config.json -> ModelConfig, dense and mixture of experts.

They are one architecture. Qwen3.5 and later are published as multimodal folders, of which only
the `text_config` is read, and as text-only exports.
"""

from __future__ import annotations

from .config import (
    AttentionConfig,
    LayerConfig,
    LinearAttentionConfig,
    MixerKind,
    ModelConfig,
    MoEConfig,
    require,
)
from .hf_fields import HfConfig, get

NUMBER = (int, float)
MIXERS: dict[str, MixerKind] = {"linear_attention": "linear", "full_attention": "full"}


def qwen3_next(config: HfConfig) -> ModelConfig:
    return _qwen(config, config, "qwen3_next")


def qwen3_5(config: HfConfig) -> ModelConfig:
    return _qwen(config, config.get("text_config") or config, "qwen3_5")


def qwen3_5_moe(config: HfConfig) -> ModelConfig:
    return _qwen(config, config.get("text_config") or config, "qwen3_5_moe")


def mixers(text: HfConfig, count: int) -> list[MixerKind]:
    """The explicit `layer_types`, or the pattern of `full_attention_interval`."""
    types = text.get("layer_types")
    if types is None:
        every = get(text, "full_attention_interval", int, 4)
        types = [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
        ]
    require(len(types) == count, "layer_types", types, f"a list of {count} entries")
    require(set(types) <= set(MIXERS), "layer_types", types, f"only {sorted(MIXERS)}")
    return [MIXERS[kind] for kind in types]


def _qwen(config: HfConfig, text: HfConfig, family: str) -> ModelConfig:
    count = get(text, "num_hidden_layers", int)
    eps = get(text, "rms_norm_eps", NUMBER, 1e-6)
    require(not text.get("attention_bias"), "attention_bias", text.get("attention_bias"), "false")
    activation = get(text, "hidden_act", str, "silu")
    require(activation == "silu", "hidden_act", activation, "silu")
    tie = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    sparse = _sparse_layers(text, count, family)
    return ModelConfig(
        family=family,
        vocab_size=get(text, "vocab_size", int),
        hidden_size=get(text, "hidden_size", int),
        layers=tuple(
            LayerConfig(mixer, "moe" if i in sparse else "mlp")
            for i, mixer in enumerate(mixers(text, count))
        ),
        linear=LinearAttentionConfig(
            kind="gdn",
            key_heads=get(text, "linear_num_key_heads", int, 16),
            value_heads=get(text, "linear_num_value_heads", int, 32),
            key_dim=get(text, "linear_key_head_dim", int, 128),
            value_dim=get(text, "linear_value_head_dim", int, 128),
            conv_size=get(text, "linear_conv_kernel_dim", int, 4),
            norm_eps=eps,
        ),
        full=_attention(text),
        mlp_width=get(text, "intermediate_size", int) if len(sparse) < count else 0,
        moe=_moe(text, family) if sparse else None,
        norm_eps=eps,
        tie_embeddings=bool(tie),
        max_context=get(text, "max_position_embeddings", int, 32768),
    )


def _attention(text: HfConfig) -> AttentionConfig:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) or "default"
    require(kind == "default", "rope_type", kind, "default (no scaling of the rotation)")
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    theta = rope.get("rope_theta", text.get("rope_theta", 1e7))
    head_dim = get(text, "head_dim", int, 256)
    return AttentionConfig(
        heads=get(text, "num_attention_heads", int),
        kv_heads=get(text, "num_key_value_heads", int),
        head_dim=head_dim,
        rotary_dim=int(head_dim * factor),
        rope_theta=float(theta),
        output_gate=True,
        qk_norm="head",
    )


def _sparse_layers(text: HfConfig, count: int, family: str) -> frozenset[int]:
    """The layers with experts: none, all, or for Qwen3-Next those that the config picks."""
    if family == "qwen3_5":
        return frozenset()
    if family == "qwen3_5_moe":
        return frozenset(range(count))
    if not get(text, "num_experts", int, 512):
        return frozenset()
    step, dense = get(text, "decoder_sparse_step", int, 1), text.get("mlp_only_layers") or ()
    require(step > 0, "decoder_sparse_step", step, "a positive number")
    return frozenset(i for i in range(count) if i not in dense and (i + 1) % step == 0)


def _moe(text: HfConfig, family: str) -> MoEConfig:
    next_ = family == "qwen3_next"
    return MoEConfig(
        experts=get(text, "num_experts", int, 512 if next_ else 256),
        top_k=get(text, "num_experts_per_tok", int, 10 if next_ else 8),
        expert_width=get(text, "moe_intermediate_size", int, 512),
        shared_width=get(text, "shared_expert_intermediate_size", int, 512),
        shared_gate=True,
        scoring="softmax",
        renormalize=get(text, "norm_topk_prob", bool, True) if next_ else True,
    )
