"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and mixture of experts.

Zero-centred norms but the gated one. What the tensor names say, and not the family: multimodal
folder (`model.language_model.`) or text alone (`model.`); projections of the linear layers packed
by key head or flat; experts fused or one by one.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jhybrid.config import AttentionConfig, LinearAttentionConfig, ModelConfig, MoEConfig

from ..mapping import Rule, Skip, Source, Table, Transform
from .common import (
    conv_by_key_head,
    dense_mlp,
    group_rows,
    reshaped,
    single,
    stacked,
    unchanged,
    ungroup_rows,
    zero_centred,
)

MULTIMODAL, TEXT_ONLY, HEAD = "model.language_model.", "model.", "lm_head.weight"

SKIPS = (
    Skip("vision tower", r"model\.visual\."),
    Skip("multi-token prediction", r"mtp\."),
)


def table(config: ModelConfig, names: Collection[str]) -> Table:
    """The table for a checkpoint with these tensor names; with none, the hub's text-only form."""
    multimodal = any(name.startswith(MULTIMODAL) for name in names)
    prefix = MULTIMODAL if multimodal else TEXT_ONLY
    hidden, words = config.hidden_size, (config.vocab_size, config.hidden_size)
    embedding = prefix + "embed_tokens.weight"
    rules = [
        unchanged("embedding", embedding, words),
        zero_centred("norm", prefix + "norm.weight", hidden),
    ]
    copies = ()
    if not config.tie_embeddings:
        rules.append(unchanged("head", HEAD, words))
    elif HEAD in names and embedding in names:
        copies = ((HEAD, embedding),)
    for i in range(len(config.layers)):
        rules += _layer(config, i, f"layers.{i}.", f"{prefix}layers.{i}.", names)
    return Table(tuple(rules), SKIPS, copies)


def _layer(
    config: ModelConfig, number: int, target: str, source: str, names: Collection[str]
) -> list[Rule]:
    layer, hidden = config.layers[number], config.hidden_size
    rules = [
        zero_centred(target + "mixer_norm", source + "input_layernorm.weight", hidden),
        zero_centred(target + "ffn_norm", source + "post_attention_layernorm.weight", hidden),
    ]
    mixer, ffn = target + "mixer.", target + "ffn."
    if layer.mixer == "linear":
        attention_source = source + "linear_attn."
        packed = attention_source + "in_proj_qkvz.weight"
        flat = attention_source + "in_proj_qkv.weight"
        is_packed = packed in names or (config.family == "qwen3_next" and flat not in names)
        projections = packed_projections if is_packed else flat_projections
        rules += projections(mixer, attention_source, hidden, config.linear)
        rules += delta_net(mixer, attention_source, hidden, config.linear)
    else:
        assert isinstance(config.full, AttentionConfig)
        rules += attention(mixer, source + "self_attn.", hidden, config.full)
    if layer.feed_forward == "moe":
        assert config.moe is not None
        single_ = source + "mlp.experts.0.gate_proj.weight" in names
        fused = source + "mlp.experts.gate_up_proj" in names
        fused = fused or (config.family == "qwen3_5_moe" and not single_)
        rules += experts(ffn, source + "mlp.", hidden, config.moe, fused=fused)
    else:
        rules += dense_mlp(ffn, source + "mlp.", hidden, config.mlp_width)
    return rules


def experts(target: str, source: str, hidden: int, c: MoEConfig, *, fused: bool) -> list[Rule]:
    """Router, experts and the gated shared expert. Fused tensors have gate rows, then up rows."""
    gate_up, down = (c.experts, 2, c.expert_width, hidden), (c.experts, hidden, c.expert_width)
    each = source + "experts."
    if fused:
        both = (c.experts, 2 * c.expert_width, hidden)
        routed = [
            reshaped(target + "gate_up", gate_up, each + "gate_up_proj", both),
            unchanged(target + "down", each + "down_proj", down),
        ]
    else:
        parts = [f"{each}{e}.{part}_proj." for e in range(c.experts) for part in ("gate", "up")]
        downs = [f"{each}{e}.down_proj." for e in range(c.experts)]
        routed = [single(target + "gate_up", parts, gate_up), single(target + "down", downs, down)]
    return [
        unchanged(target + "router", source + "gate.weight", (c.experts, hidden)),
        *routed,
        *dense_mlp(target + "shared.", source + "shared_expert.", hidden, c.shared_width),
        reshaped(
            target + "shared_gate", (hidden,), source + "shared_expert_gate.weight", (1, hidden)
        ),
    ]


def attention(target: str, source: str, hidden: int, c: AttentionConfig) -> list[Rule]:
    """Rows of q_proj are, per head, the query and then the output gate."""
    q, kv = (c.heads, 1 + c.output_gate, c.head_dim), (c.kv_heads, c.head_dim)
    q_rows, kv_rows = c.heads * (1 + c.output_gate) * c.head_dim, c.kv_heads * c.head_dim
    out = (hidden, c.heads, c.head_dim)
    return [
        reshaped(target + "q", (*q, hidden), source + "q_proj.weight", (q_rows, hidden)),
        reshaped(target + "k", (*kv, hidden), source + "k_proj.weight", (kv_rows, hidden)),
        reshaped(target + "v", (*kv, hidden), source + "v_proj.weight", (kv_rows, hidden)),
        zero_centred(target + "q_norm", source + "q_norm.weight", c.head_dim),
        zero_centred(target + "k_norm", source + "k_norm.weight", c.head_dim),
        reshaped(target + "out", out, source + "o_proj.weight", (hidden, c.heads * c.head_dim)),
    ]


def delta_net(target: str, source: str, hidden: int, c: LinearAttentionConfig) -> list[Rule]:
    """All of a linear layer but its input projections, which come packed or flat."""
    gates, values = (c.key_heads, c.group), c.value_heads * c.value_dim
    return [
        conv_by_key_head(target + "conv", source + "conv1d.weight", c),
        reshaped(target + "A_log", gates, source + "A_log", (c.value_heads,)),
        reshaped(target + "dt_bias", gates, source + "dt_bias", (c.value_heads,)),
        unchanged(target + "norm", source + "norm.weight", (c.value_dim,)),
        reshaped(
            target + "out",
            (hidden, *gates, c.value_dim),
            source + "out_proj.weight",
            (hidden, values),
        ),
    ]


def packed_projections(
    target: str, source: str, hidden: int, c: LinearAttentionConfig
) -> list[Rule]:
    """Rows of each key head together: q | k | v | z, as here; and its b | its a."""
    width = c.conv_width + c.group * c.value_dim
    split = (c.key_heads, 2, c.group, hidden)

    def forward(ba: np.ndarray) -> np.ndarray:
        return ba.reshape(split).swapaxes(0, 1)

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        return (p.swapaxes(0, 1).reshape(-1, hidden),)

    ba = Source(source + "in_proj_ba.weight", (2 * c.value_heads, hidden))
    return [
        reshaped(
            target + "qkvz",
            (c.key_heads, width, hidden),
            source + "in_proj_qkvz.weight",
            (c.key_heads * width, hidden),
        ),
        Rule(target + "ba", (ba,), Transform(forward, inverse)),
    ]


def flat_projections(target: str, source: str, hidden: int, c: LinearAttentionConfig) -> list[Rule]:
    """All q, all k, all v; all z; all b; all a -> q | k | v | z of each key head, and b, a."""
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    widths = [c.key_dim, c.key_dim, c.group * c.value_dim, c.group * c.value_dim]

    def forward(qkv: np.ndarray, z: np.ndarray) -> np.ndarray:
        return group_rows([*np.split(qkv, [keys, 2 * keys]), z], c.key_heads)

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v, z = ungroup_rows(p, widths)
        return np.concatenate([q, k, v]), z

    sources = (
        Source(source + "in_proj_qkv.weight", (2 * keys + values, hidden)),
        Source(source + "in_proj_z.weight", (values, hidden)),
    )
    gates = [source + "in_proj_b.weight", source + "in_proj_a.weight"]
    return [
        Rule(target + "qkvz", sources, Transform(forward, inverse)),
        stacked(target + "ba", gates, (c.key_heads, c.group, hidden), (c.value_heads, hidden)),
    ]
