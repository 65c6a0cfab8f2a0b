"""Empirical horizons and state magnitudes against what they are defined to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.config import ModelConfig
from jhybrid.models.specs import ModelParams
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.observed import Observed, correlations, observe
from jhybrid.sharding import make_mesh
from tests.assertions import assert_close
from tests.kernels.oracle import gated_delta_rule

from .plans import tiny_model, tiny_params

MODELS = {
    "gdn": tiny_model("gdn"),
    "kda": tiny_model("kda"),
    "safe": tiny_model("kda", gate="safe"),
    "residuals": replace(tiny_model("kda"), residual_block=2),
    "post": replace(
        tiny_model("gdn"),
        layers=tuple(replace(layer, norm="post") for layer in tiny_model("gdn").layers),
    ),
}
PREFIX = np.random.default_rng(0).integers(0, 64, 90).tolist()


def seen(params: ModelParams, config: ModelConfig, prefix: list[int], tp: int = 1) -> Observed:
    return observe(params, config, make_mesh(tp), prefix, jnp.float32)


def with_mixers(params: ModelParams, **changed: Any) -> ModelParams:
    """The fields of every linear mixer replaced by a function of the mixer."""
    layers = []
    for layer in params.layers:
        if hasattr(layer.mixer, "A_log"):
            new: Any = {name: fn(layer.mixer) for name, fn in changed.items()}
            layer = replace(layer, mixer=replace(layer.mixer, **new))
        layers.append(layer)
    return replace(params, layers=tuple(layers))


@pytest.mark.parametrize("name", MODELS)
def test_a_gate_without_input_has_its_static_horizon(name: str) -> None:
    """With the projection to the gate zero, g = g_s at a_s = 0 for every token of every layer."""
    config, params = MODELS[name], tiny_params(MODELS[name])
    if config.linear.kind == "gdn":
        params = with_mixers(params, ba=lambda m: m.ba.at[1].set(0.0))
    else:
        params = with_mixers(params, decay_up=lambda m: jnp.zeros_like(m.decay_up))
    static = static_horizons(params, config, gate_input=0.0)
    found = seen(params, config, PREFIX)
    assert_close("H_e", found.horizons(static.epsilon), static.values, 1e-5)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_first_layer_token_by_token(name: str) -> None:
    """Gates of the first layer from the embedding, its state from the float64 recurrence."""
    config, params = MODELS[name], tiny_params(MODELS[name])
    found = seen(params, config, PREFIX)
    layer = params.layers[0]
    p: Any = jax.tree.map(lambda x: np.asarray(x, np.float64), layer.mixer)
    embedded = np.asarray(params.embedding, np.float64)[PREFIX]
    x = embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True) + config.norm_eps)
    x = x * np.asarray(layer.mixer_norm, np.float64)
    if name == "gdn":
        ba = np.einsum("td,ghrd->gthr", x, p.ba).reshape(2, len(x), -1)
        g = -np.exp(p.A_log.ravel()) * np.logaddexp(0, ba[1] + p.dt_bias.ravel())
        logits, qkv = ba[0], p.qkvz[:, : config.linear.conv_width]
    else:
        z = np.einsum("td,rd,hkr->thk", x, p.decay_down, p.decay_up) + p.dt_bias
        g = -np.exp(p.A_log)[:, None] * np.logaddexp(0, z)
        logits, qkv = np.einsum("td,hd->th", x, p.beta), p.qkv
    mean = g.mean(axis=0).reshape(found.log_decay[0].shape)
    assert_close("mean g", found.log_decay[0], mean, 1e-5)

    mixed = np.einsum("td,hwd->thw", x, qkv)
    padded = np.pad(mixed, ((3, 0), (0, 0), (0, 0)))
    mixed = sum(padded[j : j + len(x)] * p.conv[:, :, j] for j in range(4))
    mixed = mixed / (1 + np.exp(-mixed))
    key_dim, value_dim = config.linear.key_dim, config.linear.value_dim
    q, k, v = np.split(mixed, [key_dim, 2 * key_dim], axis=2)
    v = v.reshape(len(x), -1, value_dim)
    _, state = gated_delta_rule(q, k, v, g, 1 / (1 + np.exp(-logits)))
    over = (1, 2) if name == "gdn" else 2
    norms = np.sqrt((state**2).sum(axis=over)).reshape(found.magnitude[0].shape)
    assert_close("M_S", found.magnitude[0], norms, 1e-4)


@pytest.mark.parametrize("name", ["gdn", "residuals"])
def test_padding_and_ranks_do_not_show(name: str) -> None:
    config = MODELS[name]
    whole = seen(tiny_params(config), config, PREFIX[:64])  # fills its compiled size
    cut = seen(tiny_params(config, tp=4), config, PREFIX[:64], tp=4)
    assert_close("g over ranks", cut.log_decay, whole.log_decay, 1e-5)
    assert_close("norms over ranks", cut.magnitude, whole.magnitude, 1e-4)
    params = tiny_params(config)
    one, two = (seen(params, config, PREFIX[:n]).log_decay for n in (66, 67))
    last = 67 * two - 66 * one  # what the 67th token adds
    assert (last < 0).all()
    alone = {n: seen(params, config, [PREFIX[0]] * n).log_decay[0] for n in (1, 65)}
    assert_close("equal tokens", alone[65], alone[1], 1e-5)  # of the first layer


def test_correlations_are_of_ranks() -> None:
    rng = np.random.default_rng(0)
    values = rng.random((2, 5, 4))
    np.testing.assert_allclose(correlations(values, np.exp(5 * values)), 1)
    np.testing.assert_allclose(correlations(values, -(values**3)), -1)
    ties = np.array([[[1.0, 2.0, 2.0, 3.0]]])  # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    np.testing.assert_allclose(correlations(ties, np.arange(4.0).reshape(1, 1, 4)), np.sqrt(0.9))
    shuffled = rng.permuted(values.reshape(2, -1), axis=1).reshape(values.shape)
    assert (np.abs(correlations(values, shuffled)) < 0.7).all()


def test_an_empty_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix: expected at least one token"):
        seen(tiny_params(MODELS["gdn"]), MODELS["gdn"], [])
