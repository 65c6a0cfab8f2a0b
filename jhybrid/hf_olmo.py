"""OLMo-Hybrid's config.json -> ModelConfig.

Linear layers are pre-norm with beta in (0, 2); full-attention layers are post-norm, with q/k norms
over the whole projection and no rotation.
"""

from __future__ import annotations

from .config import AttentionConfig, LayerConfig, LinearAttentionConfig, ModelConfig, require
from .hf_fields import HfConfig, get, get_any
from .hf_qwen import MIXERS

GATED_NORM_EPS = 1e-5  # not in the config: the norm's default in the published code


def olmo_hybrid(config: HfConfig) -> ModelConfig:
    count = get(config, "num_hidden_layers", int)
    hidden, heads = get(config, "hidden_size", int), get(config, "num_attention_heads", int)
    require(
        not config.get("attention_bias"), "attention_bias", config.get("attention_bias"), "false"
    )
    activation = get(config, "hidden_act", str, "silu")
    require(activation == "silu", "hidden_act", activation, "silu")
    key_heads = get_any(config, ("linear_num_key_heads",), int, heads)
    key_dim = get_any(config, ("linear_key_head_dim",), int, int(0.75 * hidden / key_heads))
    head_dim = get_any(config, ("head_dim",), int, hidden // heads)
    theta = _rope_theta(config)
    return ModelConfig(
        family="olmo_hybrid",
        vocab_size=get(config, "vocab_size", int),
        hidden_size=hidden,
        layers=_layers(config, count),
        linear=LinearAttentionConfig(
            kind="gdn",
            key_heads=key_heads,
            value_heads=get_any(config, ("linear_num_value_heads",), int, heads),
            key_dim=key_dim,
            value_dim=get_any(config, ("linear_value_head_dim",), int, 2 * key_dim),
            conv_size=get(config, "linear_conv_kernel_dim", int, 4),
            beta_scale=2.0 if get(config, "linear_allow_neg_eigval", bool, True) else 1.0,
            norm_eps=GATED_NORM_EPS,
        ),
        full=AttentionConfig(
            heads=heads,
            kv_heads=get_any(config, ("num_key_value_heads",), int, heads),
            head_dim=head_dim,
            rotary_dim=0 if theta is None else head_dim,
            rope_theta=1e4 if theta is None else theta,
            qk_norm="full",
        ),
        mlp_width=get(config, "intermediate_size", int),
        norm_eps=get(config, "rms_norm_eps", (int, float), 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_context=get(config, "max_position_embeddings", int, 65536),
    )


def _layers(config: HfConfig, count: int) -> tuple[LayerConfig, ...]:
    """`layer_types`, or every fourth layer full; the last one where there would be none."""
    types = config.get("layer_types")
    if types is None:
        types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
        if "full_attention" not in types:
            types[-1] = "full_attention"
    require(len(types) == count, "layer_types", types, f"a list of {count} entries")
    require(set(types) <= set(MIXERS), "layer_types", types, f"only {sorted(MIXERS)}")
    return tuple(
        LayerConfig(MIXERS[kind], norm="post" if kind == "full_attention" else "pre")
        for kind in types
    )


def _rope_theta(config: HfConfig) -> float | None:
    """A theta that is written down as a number, else None: the model was trained without rotation.

    transformers rotates where the field is absent; the model's own training code does not.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        return None
    number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
    require(number, "rope_theta", theta, "a number or null")
    kind = rope.get("rope_type") or "default"
    require(kind == "default", "rope_type", kind, "default (no scaling of the rotation)")
    return float(theta)
