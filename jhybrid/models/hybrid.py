"""The hybrid stack: one loop over the layers and one match on what each one is.

`forward` runs inside a shard_map over `tp` (see `jhybrid.sharding`). A layer is a jitted function
of its own, whose number in the caches is an argument: JAX traces and lowers it once for all layers
of its shape, which takes Python longer than the rest of a compile. XLA inlines the calls, so the
program is that of the plain loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int32

from pallas_kernels.precision import working_dtype

from ..batch import Batch, Caches, DenseBatch, wanted_rows
from ..config import AttentionConfig, LatentAttentionConfig, ModelConfig
from ..layers.attention_residuals import mix_residuals
from ..layers.gated_attention import GatedAttentionParams, gated_attention
from ..layers.gated_delta_net import GatedDeltaNetParams, gated_delta_net
from ..layers.kimi_delta_attention import KimiDeltaAttentionParams, kimi_delta_attention
from ..layers.linear import project
from ..layers.mlp import MLPParams, mlp
from ..layers.moe import MoEParams, moe
from ..layers.multi_head_latent_attention import LatentAttentionParams, latent_attention
from ..layers.norm import Normed, rms_norm, value_of
from ..sharding import AXIS
from .group_inputs import write_group_inputs
from .groups import groups
from .specs import LayerParams, ModelParams

OnLayer = Callable[[LayerParams, Array, tuple[Array, ...]], None]


def embed(params: ModelParams, token_ids: Int32[Array, ...]) -> Float[Array, "... D"]:
    """Rows of the vocabulary-sharded embedding; every rank gives those it owns."""
    rows = params.embedding.shape[0]
    local = token_ids - lax.axis_index(AXIS) * rows
    mine = (local >= 0) & (local < rows)
    found = params.embedding[jnp.where(mine, local, 0)]
    return lax.psum(jnp.where(mine[..., None], found, 0), AXIS)


@struct.dataclass
class Stream:
    """What a layer hands to the next: the residual stream and, in a model with attention residuals,
    what the blocks before it have stored of it."""

    x: Float[Array, "*B D"]
    stored: tuple[Float[Array, "*B D"], ...] = ()


def forward(
    params: ModelParams,
    caches: Caches | None,
    batch: Batch,
    config: ModelConfig,
    *,
    on_layer: OnLayer | None = None,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """The residual stream after the last layer, before the final norm, and the new caches.

    Caches with pages for them receive the group inputs of the batch's tokens.
    """
    every = range(len(config.layers))
    stream = Stream(embed(params, batch.token_ids))
    stream, caches = run_layers(params, stream, caches, batch, config, every, on_layer)
    return leave(params, stream, config), caches


def run_layers(
    params: ModelParams,
    stream: Stream,
    caches: Caches | None,
    batch: Batch,
    config: ModelConfig,
    layers: range,
    on_layer: OnLayer | None = None,
) -> tuple[Stream, Caches | None]:
    """Some consecutive layers, and the new caches.

    `on_layer` is told of every layer before it runs: its parameters, the stream that enters it, and
    the streams stored by blocks.
    """
    x, stored = stream.x, stream.stored
    keep = caches is not None and caches.group_inputs is not None
    inputs = {g.layers[0]: g.stored for g in groups(config)} if keep else {}
    for number in layers:
        layer = params.layers[number]
        if (kept := inputs.get(number)) is not None:
            assert caches is not None and not isinstance(batch, DenseBatch)
            assert batch.input_slots is not None
            caches = write_group_inputs(caches, kept, x, batch.input_slots)
        if on_layer is not None:
            on_layer(layer, x, stored)
        index = place_in_caches(config, number)
        if config.residual_block is None:
            x, caches = decoder_layer(layer, x, caches, index, batch, config)
        else:
            first = number % config.residual_block == 0
            x, stored, caches = mixed_layer(layer, x, stored, caches, index, batch, config, first)
    return Stream(x, stored), caches


def place_in_caches(config: ModelConfig, number: int) -> Any:
    """Which of the layers that share its kind of cache a layer is, as an argument to jit."""
    linear = number in config.linear_layers
    return np.int32((config.linear_layers if linear else config.full_layers).index(number))


def leave(params: ModelParams, stream: Stream, config: ModelConfig) -> Float[Array, "*B D"]:
    """The residual stream behind the last layer, before the final norm."""
    if params.mix is None:
        return stream.x
    return mix_residuals(params.mix, stream.stored, stream.x, config.norm_eps)


@functools.partial(jax.jit, static_argnames="config")
def decoder_layer(
    layer: LayerParams,
    x: Float[Array, "*B D"],
    caches: Caches | None,
    index: int | Array,
    batch: Batch,
    config: ModelConfig,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """One layer; `index` counts the layers that share its kind of cache."""
    x, caches = _mixer(layer, x, x, caches, index, batch, config)
    return feed_forward(layer, x, x, config, wanted_rows(batch)), caches


@functools.partial(jax.jit, static_argnames=("config", "first"))
def mixed_layer(
    layer: LayerParams,
    x: Float[Array, "*B D"],
    stored: tuple[Float[Array, "*B D"], ...],
    caches: Caches | None,
    index: int | Array,
    batch: Batch,
    config: ModelConfig,
    first: bool,
) -> tuple[Float[Array, "*B D"], tuple[Float[Array, "*B D"], ...], Caches | None]:
    """One layer of a model with attention residuals; the `first` of a block stores the stream."""
    assert layer.mixer_mix is not None and layer.ffn_mix is not None
    mixed = mix_residuals(layer.mixer_mix, stored, x, config.norm_eps)
    stored, residual = ((*stored, x), None) if first else (stored, x)
    x, caches = _mixer(layer, mixed, residual, caches, index, batch, config)
    mixed = mix_residuals(layer.ffn_mix, stored, x, config.norm_eps)
    return feed_forward(layer, mixed, x, config, wanted_rows(batch)), stored, caches


def _mixer(
    layer: LayerParams,
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"] | None,
    caches: Caches | None,
    index: int | Array,
    batch: Batch,
    config: ModelConfig,
) -> tuple[Float[Array, "*B D"], Caches | None]:
    """The residual plus what the layer's mixer adds to it."""
    post, h = layer.norm == "post", block_input(layer, x, layer.mixer_norm, config)
    inner = None if post else residual  # added by the mixer, unless a norm comes between
    match layer.mixer:
        case GatedDeltaNetParams() as mixer:
            h, caches = gated_delta_net(mixer, h, caches, index, batch, config.linear, inner)
        case KimiDeltaAttentionParams() as mixer:
            h, caches = kimi_delta_attention(mixer, h, caches, index, batch, config.linear, inner)
        case GatedAttentionParams() as mixer:
            assert isinstance(config.full, AttentionConfig)
            h, caches = gated_attention(
                mixer, h, caches, index, batch, config.full, config.norm_eps, inner
            )
        case LatentAttentionParams() as mixer:
            assert isinstance(config.full, LatentAttentionConfig)
            h, caches = latent_attention(mixer, h, caches, index, batch, config.full, inner)
    return _after(h, layer.mixer_norm, residual, config) if post else h, caches


def block_input(
    layer: LayerParams, x: Float[Array, "*B D"], norm: Float[Array, " D"], config: ModelConfig
) -> Float[Array, "*B D"] | Normed:
    """What a mixer or a feed-forward block reads: x, normalised unless the norm comes behind it."""
    return x if layer.norm == "post" else Normed(x, norm, config.norm_eps)


def _after(
    h: Float[Array, "*B D"],
    norm: Float[Array, " D"],
    residual: Float[Array, "*B D"] | None,
    config: ModelConfig,
) -> Float[Array, "*B D"]:
    """A block's result normalised behind it, plus the residual."""
    h = rms_norm(h, norm, config.norm_eps)
    return h if residual is None else residual + h


def feed_forward(
    layer: LayerParams,
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"],
    config: ModelConfig,
    count: Int32[Array, ""] | None = None,
) -> Float[Array, "*B D"]:
    """The residual plus what the layer's feed-forward block adds to it."""
    post, h = layer.norm == "post", block_input(layer, x, layer.ffn_norm, config)
    match layer.ffn:
        case MLPParams() as ffn:
            h = mlp(ffn, h, config.activation, None if post else residual, count)
        case MoEParams() as ffn:
            assert config.moe is not None
            h = moe(ffn, value_of(h), config.moe, config.activation)
            h = h if post else residual + h
    return _after(h, layer.ffn_norm, residual, config) if post else h


def logits(
    params: ModelParams, hidden: Float[Array, "*B D"], config: ModelConfig
) -> Float[Array, "*B vocab"]:
    """Float32 logits over the whole vocabulary, the same on every rank."""
    table = params.embedding if params.head is None else params.head
    h = Normed(hidden, params.norm, config.norm_eps)
    local = project(h, table, dtype=working_dtype(hidden))
    return lax.all_gather(local, AXIS, axis=local.ndim - 1, tiled=True)
