"""Qwen3.5 and Qwen3.6 dense: flat qkv, separate z, b and a; zero-centred norms but the gated one.

The multimodal folder (`model.language_model.`) and the text-only form (`model.`) are told apart
by their tensor names.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jhybrid.config import AttentionConfig, LinearAttentionConfig, ModelConfig

from ..mapping import Rule, Skip, Source, Table, Transform
from .common import (
    conv_by_key_head,
    group_rows,
    reshaped,
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
    """The table for a checkpoint with these tensor names; with none, the text-only form."""
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
    for i, layer in enumerate(config.layers):
        target, source = f"layers.{i}.", f"{prefix}layers.{i}."
        rules += [
            zero_centred(target + "mixer_norm", source + "input_layernorm.weight", hidden),
            zero_centred(target + "ffn_norm", source + "post_attention_layernorm.weight", hidden),
            *dense_mlp(target + "ffn.", source + "mlp.", hidden, config.mlp_width),
        ]
        if layer.mixer == "linear":
            rules += delta_net(target + "mixer.", source + "linear_attn.", hidden, config.linear)
        else:
            assert isinstance(config.full, AttentionConfig)
            rules += attention(target + "mixer.", source + "self_attn.", hidden, config.full)
    return Table(tuple(rules), SKIPS, copies)


def dense_mlp(target: str, source: str, hidden: int, width: int) -> list[Rule]:
    shape = (width, hidden)
    sources = [source + "gate_proj.weight", source + "up_proj.weight"]
    return [
        stacked(target + "gate_up", sources, shape, shape),
        unchanged(target + "down", source + "down_proj.weight", (hidden, width)),
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
    gates = (c.key_heads, c.group)
    sources = [source + "in_proj_b.weight", source + "in_proj_a.weight"]
    values = c.value_heads * c.value_dim
    return [
        _qkvz(target + "qkvz", source, hidden, c),
        stacked(target + "ba", sources, (*gates, hidden), (c.value_heads, hidden)),
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


def _qkvz(target: str, source: str, hidden: int, c: LinearAttentionConfig) -> Rule:
    """All q, all k, all v; and all z -> q | k | v | z of each key head."""
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
    return Rule(target, sources, Transform(forward, inverse))
