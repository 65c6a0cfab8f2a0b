"""Small models and plans for the tests of retention."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from jhybrid.config import AttentionConfig, LayerConfig, LinearAttentionConfig, ModelConfig
from jhybrid.models.specs import ModelParams, model_specs
from jhybrid.params import ParamSpec, map_specs
from jhybrid.retention.horizon import Horizons
from jhybrid.retention.selection import RetentionPlan
from jhybrid.sharding import make_mesh, named_sharding

KINDS = ("gdn", "kda")
PATTERN = ("linear", "full", "linear", "linear", "full")


def tiny_model(kind: str, heads: int = 8, **linear: Any) -> ModelConfig:
    """Three linear layers of `heads` key heads between two full ones, five layers in all."""
    attention = AttentionConfig(heads=8, kv_heads=8, head_dim=8, rotary_dim=4)
    if kind == "gdn":
        fields: dict[str, Any] = {"value_heads": 2 * heads, "key_dim": 4, "value_dim": 6}
    else:
        fields = {"value_heads": heads, "key_dim": 4, "value_dim": 6, "low_rank": 3}
        fields["gate_low_rank"] = 5
    fields |= linear
    return ModelConfig(
        family="test",
        vocab_size=64,
        hidden_size=32,
        layers=tuple(LayerConfig(mixer) for mixer in PATTERN),
        linear=LinearAttentionConfig(kind, key_heads=heads, **fields),  # type: ignore[arg-type]
        full=attention,
        mlp_width=16,
    )


def tiny_params(config: ModelConfig, tp: int = 1, seed: int = 0) -> ModelParams:
    """Random weights, decay parameters included, in float32 on a mesh of `tp` devices."""
    rng, mesh = np.random.default_rng(seed), make_mesh(tp)

    def one(spec: ParamSpec) -> jax.Array:
        value = rng.standard_normal(spec.shape, np.float32) / np.float32(spec.fan_in) ** 0.5
        return jax.device_put(value, named_sharding(mesh, spec.axes))

    return map_specs(one, model_specs(config))


def tiny_horizons(config: ModelConfig, seed: int = 0) -> Horizons:
    """Horizons of 1 to 1024 tokens, log-uniform."""
    linear = config.linear
    shape = (len(config.linear_layers), linear.value_heads, linear.decay_width)
    values = 2 ** np.random.default_rng(seed).uniform(0, 10, shape)
    rows = 1 if linear.kind == "kda" else linear.key_dim
    return Horizons(values, rows, -0.3, 1e-3, f"sha256:{seed}")


@st.composite
def plans(draw: st.DrawFn, config: ModelConfig) -> RetentionPlan:
    """Any plan of a model: each layer keeps none, all or a random share of its units."""
    horizons = tiny_horizons(config, draw(st.integers(0, 2**16)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    share = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))
    shares = draw(st.lists(share, min_size=len(horizons.values), max_size=len(horizons.values)))
    keep = rng.random(horizons.values.shape) < np.array(shares)[:, None, None]
    return RetentionPlan(keep, horizons, 16, "any")
