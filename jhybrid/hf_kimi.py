"""Kimi-Linear's and Kimi-K3's config.json -> ModelConfig.

K3's text config calls itself `kimi_linear` and names the same fields, so the two are told apart by
the outer `model_type` or by the fields that only K3 has.
"""

from __future__ import annotations

from .config import (
    FeedForwardKind,
    LatentAttentionConfig,
    LayerConfig,
    LinearAttentionConfig,
    MixerKind,
    ModelConfig,
    MoEConfig,
    require,
)
from .hf_fields import HfConfig, get, get_any
from .layers.mlp import SITU_GATE_BOUND, SITU_UP_BOUND

NUMBER = (int, float)
K3_ONLY = ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate")


def kimi(config: HfConfig) -> ModelConfig:
    """A whole config, or the text part of a multimodal one (of which only the text is read)."""
    text: HfConfig = config.get("text_config") or config
    linear: HfConfig = text.get("linear_attn_config") or {}
    full_rank = bool(linear.get("use_full_rank_gate"))
    k3 = config.get("model_type") == "kimi_k3" or full_rank or any(map(text.get, K3_ONLY))
    count = get(text, "num_hidden_layers", int)
    eps = float(get(text, "rms_norm_eps", NUMBER, 1e-5))
    mixers, blocks = _mixers(text, linear, count), _feed_forwards(text, count)
    activation = get(text, "hidden_act", str, "silu")
    require(activation in ("silu", "situ"), "hidden_act", activation, "silu or situ")
    _require_supported(text)
    return ModelConfig(
        family="kimi_k3" if k3 else "kimi_linear",
        vocab_size=get(text, "vocab_size", int),
        hidden_size=get(text, "hidden_size", int),
        layers=tuple(LayerConfig(*kinds) for kinds in zip(mixers, blocks, strict=True)),
        linear=_linear(text, linear, eps, safe_gate=k3),
        full=LatentAttentionConfig(
            heads=get(text, "num_attention_heads", int),
            latent_dim=get(text, "kv_lora_rank", int),
            nope_dim=get(text, "qk_nope_head_dim", int),
            shared_dim=get(text, "qk_rope_head_dim", int),
            value_dim=get(text, "v_head_dim", int),
            query_low_rank=get_any(text, ("q_lora_rank",), int, None),
            output_gate=bool(text.get("mla_use_output_gate")),
        ),
        mlp_width=get(text, "intermediate_size", int),
        moe=_moe(text, eps) if "moe" in blocks else None,
        activation=activation,
        norm_eps=eps,
        tie_embeddings=bool(text.get("tie_word_embeddings", False)),
        max_context=get_any(text, ("model_max_length", "max_position_embeddings"), int, 32768),
        residual_block=get_any(text, ("attn_res_block_size",), int, None),
    )


def _require_supported(text: HfConfig) -> None:
    nope = text.get("mla_use_nope", True)
    require(nope is True, "mla_use_nope", nope, "true (latent attention without rotation)")
    require(not text.get("attention_bias"), "attention_bias", text.get("attention_bias"), "false")
    for field, value in (
        ("activation_situ_beta", SITU_GATE_BOUND),
        ("activation_situ_linear_beta", SITU_UP_BOUND),
    ):
        require(text.get(field) in (None, value), field, text.get(field), str(value))


def _mixers(text: HfConfig, linear: HfConfig, count: int) -> list[MixerKind]:
    """Of each layer: from `layer_types`, or from the two lists, which count layers from 1."""
    types = text.get("layer_types")
    if types is not None:
        known: dict[str, MixerKind] = {"linear_attention": "linear", "full_attention": "full"}
        good = len(types) == count and set(types) <= set(known)
        require(good, "layer_types", types, f"{count} entries of {sorted(known)}")
        return [known[name] for name in types]
    full = get(linear, "full_attn_layers", list)
    both = sorted([*full, *get(linear, "kda_layers", list)])
    expected = f"each layer from 1 to {count} in one of full_attn_layers and kda_layers"
    require(both == [*range(1, count + 1)], "linear_attn_config", both, expected)
    return ["full" if i + 1 in full else "linear" for i in range(count)]


def _feed_forwards(text: HfConfig, count: int) -> list[FeedForwardKind]:
    """Dense in the first layers, experts in the others; dense everywhere without experts."""
    types = text.get("mlp_layer_types")
    if types is not None:
        known: dict[str, FeedForwardKind] = {"dense": "mlp", "sparse": "moe"}
        good = len(types) == count and set(types) <= set(known)
        require(good, "mlp_layer_types", types, f"{count} entries of {sorted(known)}")
        return [known[name] for name in types]
    every = text.get("moe_layer_freq", 1)
    require(every == 1, "moe_layer_freq", every, "1")
    if not get_any(text, ("num_experts", "num_local_experts"), int, None):
        return ["mlp"] * count
    dense = get(text, "first_k_dense_replace", int, 1)
    return ["mlp" if i < dense else "moe" for i in range(count)]


def _linear(
    text: HfConfig, linear: HfConfig, eps: float, *, safe_gate: bool
) -> LinearAttentionConfig:
    """`gate_lower_bound` counts in Kimi-K3 only: Kimi-Linear's code does not read it."""
    heads = get(linear, "num_heads", int, text.get("linear_num_heads", ...))
    dim = get(linear, "head_dim", int, text.get("linear_head_dim", ...))
    conv = get(linear, "short_conv_kernel_size", int, text.get("linear_conv_kernel_dim", 4))
    bound = get_any(linear, ("gate_lower_bound",), NUMBER, None) if safe_gate else None
    return LinearAttentionConfig(
        kind="kda",
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_size=conv,
        gate="softplus" if bound is None else "safe",
        gate_lower_bound=-5.0 if bound is None else float(bound),
        norm_eps=eps,
        low_rank=dim,
        gate_low_rank=None if linear.get("use_full_rank_gate") else dim,
    )


def _moe(text: HfConfig, eps: float) -> MoEConfig:
    scoring = text.get("moe_router_activation_func", "sigmoid")
    require(scoring == "sigmoid", "moe_router_activation_func", scoring, "sigmoid")
    width = get(text, "moe_intermediate_size", int)
    shared = get_any(text, ("num_shared_experts", "n_shared_experts"), int, 0)
    return MoEConfig(
        experts=get_any(text, ("num_experts", "num_local_experts"), int),
        top_k=get_any(text, ("num_experts_per_token", "num_experts_per_tok"), int),
        expert_width=width,
        shared_width=shared * width,  # several shared experts are one wide block
        shared_gate=False,
        scoring="sigmoid",
        renormalize=get_any(text, ("moe_renormalize", "norm_topk_prob"), bool, True),
        scaling=float(get(text, "routed_scaling_factor", NUMBER)),
        groups=get_any(text, ("num_expert_group", "n_group"), int, 1),
        top_groups=get_any(text, ("topk_group",), int, 1),
        latent_width=get_any(text, ("routed_expert_hidden_size",), int, None),
        latent_norm=bool(text.get("latent_moe_use_norm")),
        norm_eps=eps,
    )
