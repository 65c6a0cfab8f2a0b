"""Random decay parameters compress as the published models do."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid import horizons
from jhybrid.config import LinearAttentionConfig
from jhybrid.horizons import HorizonDistribution
from jhybrid.models.specs import model_specs
from jhybrid.params import ParamSpec, init_params, is_spec
from jhybrid.presets import preset
from jhybrid.sharding import make_mesh

GDN = preset("qwen3-next-80b").linear
KDA = LinearAttentionConfig("kda", 32, 32, 128, 128, low_rank=128, horizons=horizons.KIMI_LINEAR)
SAFE = replace(
    KDA, key_heads=96, value_heads=96, gate="safe", gate_lower_bound=-5.0, horizons=horizons.KIMI_K3
)
# linear layers, representative gate input, published capacities
CASES = {
    "qwen3_next": (GDN, 36, -0.3, horizons.QWEN3_NEXT_CAPACITY),
    "kimi_linear": (KDA, 20, -0.3, horizons.KIMI_LINEAR_CAPACITY),
    "kimi_k3": (SAFE, 69, 0.8, horizons.KIMI_K3_CAPACITY),
}


def sampled(c: LinearAttentionConfig, layers: int, tp: int = 1, seed: int = 0) -> np.ndarray:
    """dt_bias [layers, heads, channels] as a model of this many linear layers gets it."""
    kda = c.kind == "kda"
    shape = (c.key_heads, c.key_dim if kda else c.group)
    specs = [
        ParamSpec(shape, ("key_heads", None), c.decay_bias, dtype=jnp.float32, index=i)
        for i in range(layers)
    ]
    made = init_params(specs, jax.random.key(seed), jnp.bfloat16, make_mesh(tp))
    return np.stack([np.asarray(x).reshape(c.value_heads, -1) for x in made])


def horizon(c: LinearAttentionConfig, dt_bias: np.ndarray, gate_input: float) -> np.ndarray:
    """ln(1e-3) / g for A_log = 0."""
    z = dt_bias.astype(np.float64) + gate_input
    if c.gate == "softplus":
        return np.log(1e-3) / -np.log1p(np.exp(z))
    return np.log(1e-3) / (c.gate_lower_bound / (1 + np.exp(-z)))


@pytest.mark.parametrize("case", CASES)
def test_capacities_are_the_published_ones(case: str) -> None:
    c, layers, gate_input, capacities = CASES[case]
    h = horizon(c, sampled(c, layers), gate_input)
    recurrent = c.value_heads * c.key_dim * c.value_dim * 4
    conv = c.key_heads * c.conv_width * (c.conv_size - 1) * 2
    for cutoff, published in capacities.items():
        kept = (h > cutoff).mean()
        expected = ((recurrent + conv) / published - conv) / recurrent
        assert abs(kept - expected) < 0.005, (cutoff, kept, expected)
        capacity = (recurrent + conv) / (kept * recurrent + conv)
        assert abs(capacity / published - 1) < 0.03, (cutoff, capacity)


def test_medians_are_the_published_ones() -> None:
    for case, decay in (("qwen3_next", 0.969), ("kimi_linear", 0.471), ("kimi_k3", 0.942)):
        c, layers, gate_input, _ = CASES[case]
        found = np.median(horizon(c, sampled(c, layers), gate_input))
        assert abs(np.exp(np.log(1e-3) / found) - decay) < 0.01


def test_spread_over_heads_and_layers() -> None:
    """About the published shares of mixed heads, and ranges of the layers' kept fractions."""
    for case, cutoff, mixed, low, high in (
        ("kimi_linear", 16, 0.608, 0.179, 0.558),
        ("kimi_k3", 64, 0.983, 0.267, 0.741),
    ):
        c, layers, gate_input, _ = CASES[case]
        kept = (horizon(c, sampled(c, layers), gate_input) > cutoff).mean(-1)
        assert abs(((kept > 0) & (kept < 1)).mean() - mixed) < 0.05
        layer_means = kept.mean(-1)
        assert abs(layer_means.min() - low) < 0.15
        assert abs(layer_means.max() - high) < 0.1


def test_deterministic_and_the_same_on_every_mesh() -> None:
    first = sampled(KDA, 3)
    np.testing.assert_array_equal(sampled(KDA, 3), first)
    np.testing.assert_allclose(sampled(KDA, 3, tp=4), first, rtol=0, atol=1e-5)
    assert not np.array_equal(sampled(KDA, 3, seed=1), first)
    assert not np.array_equal(first[0], first[1])


def test_presets_carry_the_distribution() -> None:
    specs = model_specs(preset("qwen3-next-80b"))
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    indices = [leaf.index for leaf in leaves if leaf.init == GDN.decay_bias]
    assert indices == list(range(36))


@pytest.mark.parametrize(
    "points", [((2.0, 0.0), (1.0, 1.0)), ((1.0, 0.1), (2.0, 1.0)), ((1.0, 0.0), (2.0, 0.0))]
)
def test_points_must_be_a_distribution(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="points: expected"):
        HorizonDistribution(points, 0.0, 0.1, 0.1)
