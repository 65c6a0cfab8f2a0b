"""Kimi-Linear and Kimi-K3: plain norms, three convolutions, two projections of the latents.

One table serves both, because K3 differs in features that the config states. What the tensor names
say, and not the family: the prefix; experts one by one, fused or in MXFP4; the dense blocks under
`mlp` or `block_sparse_moe`; the decay gate beside the mixer or in a `forget_gate` of its own; one
convolution or three.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jhybrid.config import LatentAttentionConfig, LinearAttentionConfig, ModelConfig

from ..mapping import Rule, Skip, Source, Table, Transform
from .common import (
    conv_by_key_head,
    dense_mlp,
    group_rows,
    reshaped,
    unchanged,
    ungroup_rows,
)
from .kimi_experts import experts

NESTED = "language_model."
LANES = 128

SKIPS = (
    Skip("vision tower", r"vision_tower\."),
    Skip("projector of image features", r"mm_projector\."),
    Skip("multi-token prediction", r"(language_model\.)?model\.mtp"),
)


def table(config: ModelConfig, names: Collection[str]) -> Table:
    """The table for a checkpoint with these tensor names; with none, the hub's layout."""
    nested = any(name.startswith(NESTED) for name in names)
    nested = nested or (not names and config.family == "kimi_k3")
    prefix, hidden = NESTED if nested else "", config.hidden_size
    words = (config.vocab_size, hidden)
    embedding, head = prefix + "model.embed_tokens.weight", prefix + "lm_head.weight"
    rules = [
        unchanged("embedding", embedding, words),
        unchanged("norm", prefix + "model.norm.weight", (hidden,)),
    ]
    copies = ()
    if not config.tie_embeddings:
        rules.append(unchanged("head", head, words))
    elif head in names or not names:  # transformers does not tie this family's head
        copies = ((head, embedding),)
    if config.residual_block is not None:
        rules += residual_mix("mix.", prefix + "model.output_attn_res", hidden)
    for i in range(len(config.layers)):
        source = f"{prefix}model.layers.{i}."
        own = {name for name in names if name.startswith(source)}
        rules += _layer(config, i, f"layers.{i}.", source, own)
    return Table(tuple(rules), SKIPS, copies)


def _layer(
    config: ModelConfig, number: int, target: str, source: str, names: Collection[str]
) -> list[Rule]:
    layer, hidden = config.layers[number], config.hidden_size
    rules = [
        unchanged(target + "mixer_norm", source + "input_layernorm.weight", (hidden,)),
        unchanged(target + "ffn_norm", source + "post_attention_layernorm.weight", (hidden,)),
    ]
    if config.residual_block is not None:
        rules += residual_mix(target + "mixer_mix.", source + "self_attention_res", hidden)
        rules += residual_mix(target + "ffn_mix.", source + "mlp_res", hidden)
    mixer, attention = target + "mixer.", source + "self_attn."
    if layer.mixer == "linear":
        padded = config.family == "kimi_k3"
        rules += delta_attention(mixer, attention, hidden, config.linear, names, padded=padded)
    else:
        assert isinstance(config.full, LatentAttentionConfig)
        rules += latent_attention(mixer, attention, hidden, config.full)
    sparse = layer.feed_forward == "moe"
    block, other = ("block_sparse_moe.", "mlp.") if sparse else ("mlp.", "block_sparse_moe.")
    if any(name.startswith(source + other) for name in names):
        block = other
    if sparse:
        rules += experts(target + "ffn.", source + block, config, names)
    else:
        rules += dense_mlp(target + "ffn.", source + block, hidden, config.mlp_width)
    return rules


def residual_mix(target: str, source: str, hidden: int) -> list[Rule]:
    return [
        unchanged(target + "norm", source + "_norm.weight", (hidden,)),
        reshaped(target + "query", (hidden,), source + "_proj.weight", (1, hidden)),
    ]


def latent_attention(target: str, source: str, hidden: int, c: LatentAttentionConfig) -> list[Rule]:
    """Rows of kv_b_proj are, per head, those of its key and then those of its value."""
    inner, rows = c.query_low_rank or hidden, c.heads * c.query_dim
    up, values = (c.heads, c.nope_dim + c.value_dim), c.heads * c.value_dim
    query = source + ("q_b_proj.weight" if c.query_low_rank else "q_proj.weight")
    rules = [
        reshaped(target + "q", (c.heads, c.query_dim, inner), query, (rows, inner)),
        unchanged(target + "kv", source + "kv_a_proj_with_mqa.weight", (c.cache_dim, hidden)),
        unchanged(target + "kv_norm", source + "kv_a_layernorm.weight", (c.latent_dim,)),
        reshaped(
            target + "kv_up",
            (*up, c.latent_dim),
            source + "kv_b_proj.weight",
            (up[0] * up[1], c.latent_dim),
        ),
        reshaped(
            target + "out",
            (hidden, c.heads, c.value_dim),
            source + "o_proj.weight",
            (hidden, values),
        ),
    ]
    if c.query_low_rank:
        rules.append(unchanged(target + "q_down", source + "q_a_proj.weight", (inner, hidden)))
        rules.append(unchanged(target + "q_norm", source + "q_a_layernorm.weight", (inner,)))
    if c.output_gate:
        shape = (c.heads, c.value_dim, hidden)
        rules.append(reshaped(target + "gate", shape, source + "g_proj.weight", (values, hidden)))
    return rules


def delta_attention(
    target: str,
    source: str,
    hidden: int,
    c: LinearAttentionConfig,
    names: Collection[str],
    *,
    padded: bool,
) -> list[Rule]:
    """`padded`: the layout to write has Kimi-K3's padded A_log; both are read."""
    heads, keys, values = c.key_heads, c.key_heads * c.key_dim, c.key_heads * c.value_dim
    decay = source
    if any(name.startswith(source + "forget_gate.") for name in names):
        decay = source + "forget_gate."
    assert c.low_rank is not None
    inner = (c.low_rank, hidden)
    rules = [
        by_head(target + "qkv", [source + f"{x}_proj.weight" for x in "qkv"], (hidden,), c),
        _conv(target + "conv", source, c, names),
        unchanged(target + "decay_down", decay + "f_a_proj.weight", inner),
        reshaped(
            target + "decay_up",
            (heads, c.key_dim, c.low_rank),
            decay + "f_b_proj.weight",
            (keys, c.low_rank),
        ),
        unchanged(target + "beta", source + "b_proj.weight", (heads, hidden)),
        _decay_scale(target + "A_log", decay + "A_log", heads, padded=padded),
        reshaped(target + "dt_bias", (heads, c.key_dim), decay + "dt_bias", (keys,)),
        unchanged(target + "norm", source + "o_norm.weight", (c.value_dim,)),
        reshaped(
            target + "out",
            (hidden, heads, c.value_dim),
            source + "o_proj.weight",
            (hidden, values),
        ),
    ]
    rank = c.gate_low_rank
    shape = (heads, c.value_dim, rank or hidden)
    gate = source + ("g_b_proj.weight" if rank else "g_proj.weight")
    rules.append(reshaped(target + "gate_up", shape, gate, (values, shape[-1])))
    if rank:
        rules.append(unchanged(target + "gate_down", source + "g_a_proj.weight", (rank, hidden)))
    return rules


def by_head(
    target: str, sources: list[str], tail: tuple[int, ...], c: LinearAttentionConfig
) -> Rule:
    """Tensors of all q, all k and all v rows -> q | k | v of each head."""
    widths = [c.key_dim, c.key_dim, c.value_dim]

    def forward(*parts: np.ndarray) -> np.ndarray:
        grouped = group_rows(list(parts), c.key_heads)
        return grouped.reshape(*grouped.shape[:2], tail[-1])

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x.reshape(-1, *tail) for x in ungroup_rows(p, widths))

    shapes = [(c.key_heads * width, *tail) for width in widths]
    named = tuple(Source(*pair) for pair in zip(sources, shapes, strict=True))
    return Rule(target, named, Transform(forward, inverse))


def _conv(target: str, source: str, c: LinearAttentionConfig, names: Collection[str]) -> Rule:
    fused = source + "conv1d.weight"
    if fused in names:
        return conv_by_key_head(target, fused, c)
    return by_head(target, [source + f"{x}_conv1d.weight" for x in "qkv"], (1, c.conv_size), c)


def _decay_scale(target: str, source: str, heads: int, *, padded: bool) -> Rule:
    """One value a head. Kimi-K3 pads it with zeros to whole rows of 128."""
    row, long = (1, 1, heads, 1), (-(-heads // LANES) * LANES,)
    shape = long if padded else row
    others = tuple({row, long, (heads,)} - {shape})

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.pad(p, (0, long[0] - heads)) if padded else p.reshape(row),)

    transform = Transform(lambda x: x.reshape(-1)[:heads], inverse)
    return Rule(target, (Source(source, shape, others=others),), transform)
