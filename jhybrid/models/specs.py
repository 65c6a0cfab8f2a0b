"""The parameters and the caches of a hybrid stack: their trees, shapes and shardings."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from ..batch import Caches
from ..config import AttentionConfig, LatentAttentionConfig, ModelConfig, NormPlacement
from ..layers.attention_residuals import ResidualMixParams, residual_mix_specs
from ..layers.gated_attention import GatedAttentionParams, gated_attention_specs
from ..layers.gated_delta_net import GatedDeltaNetParams, gated_delta_net_specs
from ..layers.kimi_delta_attention import KimiDeltaAttentionParams, kimi_delta_attention_specs
from ..layers.mlp import MLPParams, mlp_specs
from ..layers.moe import MoEParams, moe_specs
from ..layers.multi_head_latent_attention import LatentAttentionParams, latent_attention_specs
from ..params import ParamSpec, partition_specs, scale, weight
from .group_inputs import group_input_specs

LinearMixer = GatedDeltaNetParams | KimiDeltaAttentionParams
FullMixer = GatedAttentionParams | LatentAttentionParams


@struct.dataclass
class LayerParams:
    """`mixer_mix` and `ffn_mix` are there in a model with attention residuals.

    `norm` says whether the norms stand before their blocks or after them.
    """

    mixer_norm: Any  # [D] float32
    mixer: LinearMixer | FullMixer
    ffn_norm: Any  # [D] float32
    ffn: MLPParams | MoEParams
    mixer_mix: ResidualMixParams | None = None
    ffn_mix: ResidualMixParams | None = None
    norm: NormPlacement = struct.field(pytree_node=False, default="pre")


@struct.dataclass
class ModelParams:
    embedding: Any  # [vocab, D]
    layers: tuple[LayerParams, ...]
    norm: Any  # [D] float32
    head: Any  # [vocab, D], or None where the embedding serves
    mix: ResidualMixParams | None = None  # after the last layer


def model_specs(config: ModelConfig) -> ModelParams:
    """The parameter tree of a model with a ParamSpec at every leaf."""
    hidden = config.hidden_size
    table = weight((config.vocab_size, "vocab"), (hidden, None), fan_in=hidden)
    return ModelParams(
        embedding=table,
        layers=tuple(_layer_specs(config, i) for i in range(len(config.layers))),
        norm=scale(hidden),
        head=None if config.tie_embeddings else table,
        mix=_mix_specs(config),
    )


def _layer_specs(config: ModelConfig, number: int) -> LayerParams:
    hidden, layer = config.hidden_size, config.layers[number]
    if layer.feed_forward == "moe":
        assert config.moe is not None
        ffn = moe_specs(hidden, config.moe)
    else:
        ffn = mlp_specs(hidden, config.mlp_width)
    return LayerParams(
        mixer_norm=scale(hidden),
        mixer=_mixer_specs(config, number),
        ffn_norm=scale(hidden),
        ffn=ffn,
        mixer_mix=_mix_specs(config),
        ffn_mix=_mix_specs(config),
        norm=layer.norm,
    )


def _mixer_specs(config: ModelConfig, number: int) -> LinearMixer | FullMixer:
    if config.layers[number].mixer == "linear":
        kda = config.linear.kind == "kda"
        specs = kimi_delta_attention_specs if kda else gated_delta_net_specs
        index = config.linear_layers.index(number)
        return specs(config.hidden_size, config.linear, index)
    if isinstance(config.full, LatentAttentionConfig):
        return latent_attention_specs(config.hidden_size, config.full)
    return gated_attention_specs(config.hidden_size, config.full)


def _mix_specs(config: ModelConfig) -> ResidualMixParams | None:
    return None if config.residual_block is None else residual_mix_specs(config.hidden_size)


def cache_specs(
    config: ModelConfig,
    pages: int,
    page_size: int,
    slots: int,
    input_pages: int = 0,
    input_dtype: Any = None,
) -> Any:
    """The caches of a model with a ParamSpec at every leaf (shapes, dtypes, shardings, bytes).

    Without `input_pages` they keep no group inputs; `input_dtype` None keeps the model's.
    """
    full, linear = config.full, config.linear
    keys: Any
    values: Any
    lead = (pages, len(config.full_layers), page_size, config.cache_heads)
    if isinstance(full, AttentionConfig):
        axes = (None, None, None, "kv_heads", None)
        keys = values = ParamSpec((*lead, full.head_dim), axes, "zeros")
    else:  # latents belong to no head: every rank holds them all
        keys, values = ParamSpec((*lead, full.cache_dim), (None,) * 5, "zeros"), None
    channels = linear.key_heads * linear.conv_width
    lead = (slots, len(config.linear_layers))
    recurrent: Any = ParamSpec(
        (*lead, linear.value_heads, linear.key_dim, linear.value_dim),
        (None, None, "value_heads", None, None),
        "zeros",
        dtype=jnp.float32,
    )
    conv: Any = ParamSpec(
        (*lead, linear.conv_size - 1, channels), (None, None, None, "key_heads"), "zeros"
    )
    inputs: Any = None
    if input_pages:
        inputs = group_input_specs(config, input_pages, page_size, input_dtype)
    return Caches(keys, values, recurrent, conv, inputs)


def model_partition(config: ModelConfig) -> ModelParams:
    """PartitionSpecs of the parameters."""
    return partition_specs(model_specs(config))


def cache_partition(
    config: ModelConfig, *, group_inputs: bool = False, input_dtype: Any = None
) -> Caches:
    """PartitionSpecs of the caches."""
    return partition_specs(cache_specs(config, 1, 1, 1, int(group_inputs), input_dtype))
