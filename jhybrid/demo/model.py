"""The demo model in training: how it starts, runs over whole rows, and what its gates learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from pallas_kernels import unpack

from ..batch import DenseBatch
from ..config import ModelConfig
from ..layers.delta_rule import gate_activation
from ..layers.gated_delta_net import GatedDeltaNetParams, gated_delta_net_inputs
from ..layers.kimi_delta_attention import KimiDeltaAttentionParams, kimi_delta_attention_inputs
from ..layers.norm import Normed
from ..models.hybrid import decoder_layer, logits
from ..models.specs import LinearMixer, ModelParams, model_partition, model_specs
from ..params import ParamSpec, map_specs
from ..sharding import REPLICATED, sharded
from .wording import Rng

HORIZONS = (4.0, 4096.0)  # tokens; spread log-uniformly over the units of each layer at the start
FADED = 1e-3  # a horizon is the time in which a state fades to this share
NOMINAL_GATE_INPUT = -0.3  # the gate input at which static horizons are quoted


def initial_params(config: ModelConfig, seed: int) -> ModelParams:
    """Float32 parameters. Residual branches start small, decay gates spread and nearly static.

    Made with numpy: the same on every device, and without a compilation for each shape.
    """
    rng = np.random.default_rng(seed)

    def one(spec: ParamSpec) -> np.ndarray:
        match spec.init:
            case "normal":
                values = rng.standard_normal(spec.shape, np.float32)
                return values * np.float32(spec.fan_in**-0.5)
            case "ones":
                return np.ones(spec.shape, np.float32)
            case "decay_bias":
                return _spread_bias(rng, spec.shape)
            case _:  # A_log = 0: the bias alone sets the horizon
                return np.zeros(spec.shape, np.float32)

    params: ModelParams = map_specs(one, model_specs(config))
    branch = np.float32((2 * len(params.layers)) ** -0.5)
    for layer in params.layers:
        layer.mixer.out[...] *= branch
        layer.ffn.down[...] *= branch
        match layer.mixer:  # the gate's input
            case GatedDeltaNetParams() as mixer:
                mixer.ba[1] *= 0.1
            case KimiDeltaAttentionParams() as mixer:
                mixer.decay_up[...] *= 0.1
            case _:
                pass
    return jax.tree.map(jnp.asarray, params)


def _spread_bias(rng: Rng, shape: tuple[int, ...]) -> np.ndarray:
    """dt_bias of one layer: with A_log = 0, one unit in each equal part of the log range."""
    count = math.prod(shape)
    part = (rng.permutation(count) + rng.random(count)) / count
    low, high = HORIZONS
    rate = -math.log(FADED) / (low * (high / low) ** part)
    return np.log(np.expm1(rate)).astype(np.float32).reshape(shape)


def cast(params: ModelParams, config: ModelConfig, dtype: Any) -> ModelParams:
    """Parameters as the layers compute with them: matrices in `dtype`, gates and norms float32."""
    dtypes = map_specs(lambda spec: spec.dtype_in(dtype), model_specs(config))
    return jax.tree.map(lambda p, d: p.astype(d), params, dtypes)


def all_logits(
    params: ModelParams, batch: DenseBatch, config: ModelConfig
) -> Float[Array, "B T vocab"]:
    """Logits at every position of whole rows; runs inside the shard_map of one device.

    The embedding is looked up by a product with one-hot rows: its gradient is then a product too,
    not a scatter in which thousands of tokens add to the same row in bfloat16.
    """
    table = params.embedding
    x = jax.nn.one_hot(batch.token_ids, table.shape[0], dtype=table.dtype) @ table
    for layer in params.layers:
        x, _ = decoder_layer(layer, x, None, 0, batch, config)
    return logits(params, x, config)


def logits_fn(
    config: ModelConfig, mesh: Mesh, dtype: Any
) -> Callable[[ModelParams, DenseBatch], Array]:
    """(params, rows) -> float32 logits [B, T, vocab], on a mesh of one device."""

    def local(params: ModelParams, batch: DenseBatch) -> Array:
        return all_logits(cast(params, config, dtype), batch, config)

    return sharded(local, mesh, (model_partition(config), REPLICATED), REPLICATED)


def static_horizons(params: ModelParams) -> dict[str, list[float]]:
    """Tokens until a unit's state fades to 1e-3, from its weights alone, by layer, sorted."""
    horizons = {}
    for index, layer in enumerate(params.layers):
        if isinstance(layer.mixer, LinearMixer):
            bias = np.asarray(layer.mixer.dt_bias, np.float64) + NOMINAL_GATE_INPUT
            speed = np.exp(np.asarray(layer.mixer.A_log, np.float64))
            rate = speed.reshape(speed.shape + (1,) * (bias.ndim - speed.ndim))
            faded = np.round(-math.log(FADED) / (rate * np.logaddexp(0, bias)), 1)
            horizons[str(index)] = sorted(faded.ravel().tolist())
    return horizons


def gates_fn(
    config: ModelConfig, mesh: Mesh, dtype: Any
) -> Callable[[ModelParams, Array], list[Array]]:
    """(params, token_ids [B, T]) -> log-decays [B, T, units] of every linear layer on that text."""

    def log_decays(mixer: LinearMixer, h: Normed, batch: DenseBatch) -> Array:
        if isinstance(mixer, GatedDeltaNetParams):
            inputs, *_ = gated_delta_net_inputs(mixer, h, None, 0, batch, config.linear)
        else:
            inputs, _ = kimi_delta_attention_inputs(mixer, h, None, 0, batch, config.linear)
        g = unpack(*inputs, config.linear.key_dim, gate_activation(config.linear))[3]
        return g.reshape(*g.shape[:2], -1)

    def local(params: ModelParams, token_ids: Array) -> list[Array]:
        params, batch = cast(params, config, dtype), DenseBatch(token_ids)
        x, decays = params.embedding[token_ids], []
        for layer in params.layers:
            if isinstance(layer.mixer, LinearMixer):
                h = Normed(x, layer.mixer_norm, config.norm_eps)
                decays.append(log_decays(layer.mixer, h, batch))
            x, _ = decoder_layer(layer, x, None, 0, batch, config)
        return decays

    return jax.jit(sharded(local, mesh, (model_partition(config), REPLICATED), REPLICATED))


def text_horizons(decays: list[Array]) -> list[dict[str, list[float]]]:
    """Per layer, units sorted: horizon at the mean decay, and at its 90th and 10th percentile.

    The last two differ where a gate follows the text; they would be equal for a frozen one.
    """
    found = []
    for g in decays:
        rates = -np.asarray(g, np.float64).reshape(-1, g.shape[-1])
        order = np.argsort(-rates.mean(axis=0))
        low, high = np.quantile(rates, (0.1, 0.9), axis=0)
        levels = {"mean": rates.mean(axis=0), "fast": high, "slow": np.maximum(low, 1e-9)}
        found.append(
            {name: np.round(-math.log(FADED) / x[order], 1).tolist() for name, x in levels.items()}
        )
    return found
