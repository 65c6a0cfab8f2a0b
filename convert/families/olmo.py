"""OLMo-Hybrid: plain norms, separate projections, three convolutions.

Names differ between exporters, and each kind of layer has its own pair of norms; every synonym is
told by the tensor names. save_pretrained of transformers cuts the convolution into three equal
parts whatever the true widths are, so the parts are joined before they are cut.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jhybrid.config import AttentionConfig, LinearAttentionConfig, ModelConfig

from ..mapping import Rule, Source, Table, Transform
from .common import (
    conv_by_key_head,
    dense_mlp,
    group_rows,
    reshaped,
    stacked,
    unchanged,
    ungroup_rows,
)

PREFIXES = ("", "model.language_model.", "language_model.")


def table(config: ModelConfig, names: Collection[str]) -> Table:
    """The table for a checkpoint with these tensor names; with none, the hub's layout."""
    words = (config.vocab_size, config.hidden_size)
    embedding = _first(names, [p + "model.embed_tokens.weight" for p in PREFIXES])
    if embedding not in names:
        embedding = _first(names, [embedding, *(p + "embed_tokens.weight" for p in PREFIXES[1:])])
    prefix = embedding.removesuffix("embed_tokens.weight")
    rules = [
        unchanged("embedding", embedding, words),
        unchanged("norm", prefix + "norm.weight", words[1:]),
    ]
    head = _first(names, [p + "lm_head.weight" for p in PREFIXES])
    copies = ()
    if not config.tie_embeddings:
        rules.append(unchanged("head", head, words))
    elif head in names:
        copies = ((head, embedding),)
    for i in range(len(config.layers)):
        source = f"{prefix}layers.{i}."
        own = {name for name in names if name.startswith(source)}
        rules += _layer(config, i, f"layers.{i}.", source, own)
    return Table(tuple(rules), (), copies)


def _first(names: Collection[str], synonyms: list[str]) -> str:
    """The synonym that the checkpoint uses; the first one where it uses none."""
    return next((name for name in synonyms if name in names), synonyms[0])


def _layer(
    config: ModelConfig, number: int, target: str, source: str, names: Collection[str]
) -> list[Rule]:
    layer, hidden = config.layers[number], config.hidden_size

    def norm(name: str, *published: str) -> Rule:
        found = _first(names, [f"{source}{x}.weight" for x in published])
        return unchanged(target + name, found, (hidden,))

    first = ("input_layernorm", "attention_layer_norm")
    second = ("post_attention_layernorm", "feedforward_layer_norm")
    if layer.mixer == "linear":
        rules = [norm("mixer_norm", *first), norm("ffn_norm", *second)]
        rules += delta_net(target + "mixer.", source + "linear_attn.", hidden, config.linear, names)
    else:
        assert isinstance(config.full, AttentionConfig)
        rules = [norm("mixer_norm", *second), norm("ffn_norm", "post_feedforward_layernorm")]
        rules += attention(target + "mixer.", source + "self_attn.", hidden, config.full)
    other = source + "block_sparse_moe."
    block = other if any(name.startswith(other) for name in names) else source + "mlp."
    return rules + dense_mlp(target + "ffn.", block, hidden, config.mlp_width)


def attention(target: str, source: str, hidden: int, c: AttentionConfig) -> list[Rule]:
    """One norm over all heads of the queries, one over all heads of the keys."""
    q, kv = (c.heads, c.head_dim), (c.kv_heads, c.head_dim)
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return [
        reshaped(
            target + "q", (c.heads, 1, c.head_dim, hidden), *_matrix(source, "q", q_rows, hidden)
        ),
        reshaped(target + "k", (*kv, hidden), *_matrix(source, "k", kv_rows, hidden)),
        reshaped(target + "v", (*kv, hidden), *_matrix(source, "v", kv_rows, hidden)),
        reshaped(target + "q_norm", q, source + "q_norm.weight", (q_rows,)),
        reshaped(target + "k_norm", kv, source + "k_norm.weight", (kv_rows,)),
        reshaped(target + "out", (hidden, *q), *_matrix(source, "o", hidden, q_rows)),
    ]


def _matrix(source: str, name: str, rows: int, columns: int) -> tuple[str, tuple[int, int]]:
    return f"{source}{name}_proj.weight", (rows, columns)


def delta_net(
    target: str, source: str, hidden: int, c: LinearAttentionConfig, names: Collection[str]
) -> list[Rule]:
    gates, values = (c.key_heads, c.group), c.value_heads * c.value_dim
    out = _first(names, [source + "o_proj.weight", source + "out_proj.weight"])
    norm = _first(names, [source + "o_norm.weight", source + "norm.weight"])
    ba = [source + "b_proj.weight", source + "a_proj.weight"]
    return [
        _qkvz(target + "qkvz", source, hidden, c),
        stacked(target + "ba", ba, (*gates, hidden), (c.value_heads, hidden)),
        _conv(target + "conv", source, c, names),
        reshaped(target + "A_log", gates, source + "A_log", (c.value_heads,)),
        reshaped(target + "dt_bias", gates, source + "dt_bias", (c.value_heads,)),
        unchanged(target + "norm", norm, (c.value_dim,)),
        reshaped(target + "out", (hidden, *gates, c.value_dim), out, (hidden, values)),
    ]


def _widths(c: LinearAttentionConfig) -> list[int]:
    """Rows of all q, all k, all v."""
    keys = c.key_heads * c.key_dim
    return [keys, keys, c.value_heads * c.value_dim]


def _qkvz(target: str, source: str, hidden: int, c: LinearAttentionConfig) -> Rule:
    """All q, all k, all v, all z -> q | k | v | z of each key head."""
    per_head = [c.key_dim, c.key_dim, c.group * c.value_dim, c.group * c.value_dim]
    rows = [*_widths(c), c.value_heads * c.value_dim]
    sources = [Source(*_matrix(source, x, n, hidden)) for x, n in zip("qkvg", rows, strict=True)]
    transform = Transform(
        lambda *parts: group_rows(list(parts), c.key_heads),
        lambda p: tuple(ungroup_rows(p, per_head)),
    )
    return Rule(target, tuple(sources), transform)


def _conv(target: str, source: str, c: LinearAttentionConfig, names: Collection[str]) -> Rule:
    """Parts cut at the true widths, or into thirds (the last one smaller) whatever they are."""
    joined = conv_by_key_head(target, source + "conv1d.weight", c)
    if source + "conv1d.weight" in names:
        return joined
    widths = _widths(c)
    total = sum(widths)
    third = -(-total // 3)
    cuts = zip("qkv", widths, (third, third, total - 2 * third), strict=True)
    taps = (1, c.conv_size)
    sources = [
        Source(f"{source}{x}_conv1d.weight", (n, *taps), others=((other, *taps),) * (other != n))
        for x, n, other in cuts
    ]

    def forward(*parts: np.ndarray) -> np.ndarray:
        return joined.transform.forward(np.concatenate(parts))

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        (whole,) = joined.transform.inverse(p)
        return tuple(np.split(whole, np.cumsum(widths)[:-1]))

    return Rule(target, tuple(sources), Transform(forward, inverse))
