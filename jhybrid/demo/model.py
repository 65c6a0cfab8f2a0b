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
from jaxtyping import Float, Int32

from ..batch import DenseBatch
from ..config import ModelConfig
from ..layers.gated_attention import GatedAttentionParams
from ..layers.gated_delta_net import GatedDeltaNetParams
from ..layers.linear import project
from ..layers.norm import rms_norm
from ..models.hybrid import (
    REPLICATED,
    ModelParams,
    decoder_layer,
    logits,
    model_partition,
    model_specs,
    sharded,
)
from ..params import init_params, map_specs
from .wording import Rng

HORIZONS = (4.0, 4096.0)  # tokens; spread log-uniformly over the heads of each layer at the start
FADED = 1e-3  # a horizon is the time in which a state fades to this share
NOMINAL_GATE_INPUT = -0.3  # the gate input at which static horizons are quoted


def initial_params(config: ModelConfig, seed: int, mesh: Mesh) -> ModelParams:
    """Float32 parameters. Residual branches start small, decay gates spread and nearly static."""
    params = init_params(model_specs(config), jax.random.key(seed), jnp.float32, mesh)
    rng = np.random.default_rng(seed)
    branch = (2 * len(params.layers)) ** -0.5
    layers = []
    for layer in params.layers:
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNetParams):
            mixer = mixer.replace(  # pyright: ignore[reportAttributeAccessIssue]
                out=mixer.out * branch,
                ba=mixer.ba.at[1].multiply(0.1),
                dt_bias=jnp.asarray(_spread_bias(rng, mixer.dt_bias.shape)),
            )
        else:
            assert isinstance(mixer, GatedAttentionParams)
            mixer = mixer.replace(out=mixer.out * branch)  # pyright: ignore[reportAttributeAccessIssue]
        ffn = layer.ffn.replace(down=layer.ffn.down * branch)
        layers.append(layer.replace(mixer=mixer, ffn=ffn))
    return params.replace(layers=tuple(layers))


def _spread_bias(rng: Rng, shape: tuple[int, ...]) -> np.ndarray:
    """dt_bias of one layer: with A_log = 0, one head in each equal part of the log range."""
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
    params: ModelParams, token_ids: Int32[Array, "B T"], config: ModelConfig, remat: bool
) -> Float[Array, "B T vocab"]:
    """Logits at every position of whole rows; runs inside the shard_map of one device.

    The embedding is looked up by a product with one-hot rows: its gradient is then a product too,
    not a scatter in which thousands of tokens add to the same row in bfloat16.
    """
    table = params.embedding
    x = jax.nn.one_hot(token_ids, table.shape[0], dtype=table.dtype) @ table
    step = jax.checkpoint(decoder_layer, static_argnums=(3, 5)) if remat else decoder_layer
    for layer in params.layers:
        x, _ = step(layer, x, None, 0, DenseBatch(token_ids), config)
    return logits(params, x, config)


def logits_fn(
    config: ModelConfig, mesh: Mesh, dtype: Any, *, remat: bool = False
) -> Callable[[ModelParams, Array], Array]:
    """(params, token_ids [B, T]) -> float32 logits [B, T, vocab], on a mesh of one device."""

    def local(params: ModelParams, token_ids: Array) -> Array:
        return all_logits(cast(params, config, dtype), token_ids, config, remat)

    return sharded(local, mesh, (model_partition(config), REPLICATED), REPLICATED)


def static_horizons(params: ModelParams) -> dict[str, list[float]]:
    """Tokens until a value head's state fades to 1e-3, from its weights alone, by layer, sorted."""
    horizons = {}
    for index, layer in enumerate(params.layers):
        if isinstance(layer.mixer, GatedDeltaNetParams):
            bias = np.asarray(layer.mixer.dt_bias, np.float64) + NOMINAL_GATE_INPUT
            rate = np.exp(np.asarray(layer.mixer.A_log, np.float64)) * np.logaddexp(0, bias)
            faded = np.round(-math.log(FADED) / rate, 1)
            horizons[str(index)] = sorted(faded.ravel().tolist())
    return horizons


def gates_fn(
    config: ModelConfig, mesh: Mesh, dtype: Any
) -> Callable[[ModelParams, Array], list[Array]]:
    """(params, token_ids [B, T]) -> the log-decays [B, T, H] of every linear layer on that text."""

    def local(params: ModelParams, token_ids: Array) -> list[Array]:
        params = cast(params, config, dtype)
        x, decays = params.embedding[token_ids], []
        for layer in params.layers:
            if isinstance(layer.mixer, GatedDeltaNetParams):
                h = rms_norm(x, layer.mixer_norm, config.norm_eps)
                inputs = project(h, layer.mixer.ba[1], dtype=jnp.float32)
                rate = jnp.exp(layer.mixer.A_log) * jax.nn.softplus(inputs + layer.mixer.dt_bias)
                decays.append(-rate.reshape(*token_ids.shape, -1))
            x, _ = decoder_layer(layer, x, None, 0, DenseBatch(token_ids), config)
        return decays

    return jax.jit(sharded(local, mesh, (model_partition(config), REPLICATED), REPLICATED))


def text_horizons(decays: list[Array]) -> list[dict[str, list[float]]]:
    """Per layer, heads sorted: horizon at the mean decay, and at its 90th and 10th percentile.

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
