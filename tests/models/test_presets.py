"""The presets have the sizes of the published models, counted from their specs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from jhybrid.hf_config import model_config
from jhybrid.models.specs import cache_specs, model_specs
from jhybrid.params import ParamSpec, count_bytes, count_params, is_spec
from jhybrid.presets import PRESETS, kda_layers, preset

# A few of Kimi-K3's layers: 12 KDA, 4 full, one dense block, 15 of 32 experts, and what is around.
K3_MIXES = 2 * 7168  # norm and query of one mixture of residuals
K3_EXPERT = 3 * 3072 * 3584
K3_MOE = 32 * (K3_EXPERT + 7168 + 1) + 2 * 7168 * 3584 + 3584 + 3 * 7168 * 6144
K3_DELTA = 5 * 7168 * 12288 + 128 * (7168 + 12288) + 96 * 7168 + 3 * 12288 * 4 + 96 + 12288 + 128
K3_FULL = 1536 * (7168 + 1 + 18432) + 576 * 7168 + 512 + 24576 * 512 + 2 * 7168 * 12288
K3_SLICE = (
    12 * K3_DELTA
    + 4 * K3_FULL
    + 3 * 7168 * 33792
    + 15 * K3_MOE
    + 16 * (2 * 7168 + 2 * K3_MIXES)
    + 2 * 163840 * 7168
    + 7168
    + K3_MIXES
)

# Parameters of the text model, cache bytes per token, recurrent and convolution bytes of a
# checkpoint (bfloat16 weights and caches, float32 states).
SIZES = {
    "qwen3.5-4b": (4_539_265_536 - 333_514_240, 32_768, 50_331_648, 1_179_648),
    "qwen3.6-27b": (27_356_728_560 - 460_730_096, 65_536, 150_994_944, 2_949_120),
    "qwen3.5-35b-a3b": (35_107_181_936 - 446_571_248, 20_480, 62_914_560, 1_474_560),
    "qwen3-next-80b": (79_674_391_296, 24_576, 75_497_472, 1_769_472),
    "olmo-hybrid-7b": (7_430_870_688, 122_880, 53_084_160, 1_658_880),
    # 26 layers of 256 selection biases are not counted as published parameters
    "kimi-linear-48b": (49_122_675_072 + 26 * 256, 8_064, 41_943_040, 1_474_560),
    "kimi-k3-slice": (K3_SLICE, 4 * 1_152, 75_497_472, 2_654_208),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = preset(name)
    parameters, token, recurrent, conv = SIZES[name]
    assert count_params(model_specs(config)) == parameters
    # a pool of one page of one token, and of one slot: what padding writes to
    caches = cache_specs(config, 1, 1, 1)
    assert _bytes(caches.keys) + _bytes(caches.values) == token
    assert _bytes(caches.recurrent) == recurrent
    assert _bytes(caches.conv) == conv


def test_all_of_kimi_k3() -> None:
    """The slice with all layers and experts is the published model."""
    full = [*range(4, 93, 4), 93]
    layers = kda_layers(93, full, heads=96, gate_lower_bound=-5.0, use_full_rank_gate=True)
    config = model_config(PRESETS["kimi-k3-slice"] | layers | {"num_experts": 896})
    assert round(count_params(model_specs(config)) / 1e12, 4) == 2.7795
    caches = cache_specs(config, 1, 1, 1)
    assert _bytes(caches.keys) == 27_648 and caches.values is None
    assert (_bytes(caches.recurrent), _bytes(caches.conv)) == (434_110_464, 15_261_696)


def test_every_preset_is_checked() -> None:
    assert sorted(PRESETS) == sorted(SIZES)


def test_weights_in_bfloat16() -> None:
    """Published bytes, but norms and decay parameters stay in float32 here: 0.1 % at most."""
    found = count_bytes(model_specs(preset("qwen3-next-80b")), jnp.bfloat16)
    assert 159.348e9 < found < 159.348e9 * 1.001


def _bytes(specs: object) -> int:
    leaves: list[ParamSpec] = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(math.prod(s.shape) * s.dtype_in(jnp.bfloat16).itemsize for s in leaves)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match=r"dummy: expected one of qwen3\.5-4b, .*got 'gpt'"):
        preset("gpt")
