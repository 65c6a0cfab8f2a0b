"""The end of a prefill: of its last layer no more than somebody reads.

Who draws reads what the last layer makes of its token. If that layer attends, all other tokens need
nothing of it but their keys and values, and its queries, attention and feed-forward block run for
the last token of each sequence alone, as in a decode step. Qwen3.5-4B saves a 32nd of its products
and an eighth of its attention so.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from ..batch import Caches, DecodeBatch, PrefillBatch
from ..config import AttentionConfig, LatentAttentionConfig, ModelConfig
from ..layers.attention_residuals import mix_residuals
from ..layers.gated_attention import GatedAttentionParams, write_keys
from ..layers.multi_head_latent_attention import LatentAttentionParams, write_latents
from .cut import closing_layers
from .hybrid import Stream, block_input, leave, place_in_caches, run_layers
from .specs import ModelParams


def finish(
    params: ModelParams, stream: Stream, caches: Caches, batch: PrefillBatch, config: ModelConfig
) -> tuple[Float[Array, "N D"], Caches]:
    """The residual stream of each sequence's last token behind the last layer, from the stream that
    enters `closing_layers`, and the new caches. An empty (padding) sequence gives some row."""
    last, layers = jnp.maximum(batch.cu_seqlens[1:] - 1, 0), closing_layers(config)
    assert len(layers) <= 1  # keys of a second one would take the first one of every token
    for number in layers:
        caches = _write(params, stream, caches, batch, config, number)
    ends = jax.tree.map(lambda x: x[last], stream)
    ends, new = run_layers(params, ends, caches, _last_tokens(batch, last), config, layers)
    assert new is not None
    return leave(params, ends, config), new


def finish_all(
    params: ModelParams, stream: Stream, caches: Caches, batch: PrefillBatch, config: ModelConfig
) -> tuple[Float[Array, "T D"], Caches]:
    """The same of all tokens, behind `finish`, which has written their keys: they stay."""
    batch = replace(batch, kv_slots=jnp.full_like(batch.kv_slots, -1))
    stream, new = run_layers(params, stream, caches, batch, config, closing_layers(config))
    assert new is not None
    return leave(params, stream, config), new


def _last_tokens(batch: PrefillBatch, last: Int32[Array, " N"]) -> DecodeBatch:
    """A decode step of each sequence's last token, whose keys are in their pages already."""
    empty, nowhere = jnp.diff(batch.cu_seqlens) == 0, jnp.full_like(last, -1)
    return DecodeBatch(
        token_ids=batch.token_ids[last],
        positions=jnp.where(empty, -1, batch.positions[last]),
        kv_slots=nowhere,
        page_table=batch.page_table,
        state_slots=nowhere,
    )


def _write(
    params: ModelParams,
    stream: Stream,
    caches: Caches,
    batch: PrefillBatch,
    config: ModelConfig,
    number: int,
) -> Caches:
    """Keys and values of all tokens in a full-attention layer."""
    layer, index, eps = params.layers[number], place_in_caches(config, number), config.norm_eps
    x = stream.x
    if layer.mixer_mix is not None:
        x = mix_residuals(layer.mixer_mix, stream.stored, x, eps)
    h = block_input(layer, x, layer.mixer_norm, config)
    match layer.mixer:
        case GatedAttentionParams() as mixer:
            assert isinstance(config.full, AttentionConfig)
            return write_keys(mixer, h, caches, index, batch, config.full, eps)
        case LatentAttentionParams() as mixer:
            assert isinstance(config.full, LatentAttentionConfig)
            return write_latents(mixer, h, caches, index, batch, config.full)
        case _:
            raise AssertionError(f"layer {number} is linear")
