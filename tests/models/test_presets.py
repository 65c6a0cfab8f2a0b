"""The presets have the sizes of the published models, counted from their specs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from jhybrid.models.hybrid import cache_specs, model_specs
from jhybrid.params import ParamSpec, count_bytes, count_params, is_spec
from jhybrid.presets import PRESETS, preset

# Parameters of the text model, cache bytes per token, recurrent and convolution bytes of a
# checkpoint (bfloat16 weights and caches, float32 states).
SIZES = {
    "qwen3.5-4b": (4_539_265_536 - 333_514_240, 32_768, 50_331_648, 1_179_648),
    "qwen3.6-27b": (27_356_728_560 - 460_730_096, 65_536, 150_994_944, 2_949_120),
    "qwen3.5-35b-a3b": (35_107_181_936 - 446_571_248, 20_480, 62_914_560, 1_474_560),
    "qwen3-next-80b": (79_674_391_296, 24_576, 75_497_472, 1_769_472),
    "olmo-hybrid-7b": (7_430_870_688, 122_880, 53_084_160, 1_658_880),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = preset(name)
    parameters, token, recurrent, conv = SIZES[name]
    assert count_params(model_specs(config)) == parameters
    # a pool of one page of one token, and of one slot: what padding writes to
    caches = cache_specs(config, 0, 1, 0)
    assert _bytes(caches.keys) + _bytes(caches.values) == token
    assert _bytes(caches.recurrent) == recurrent
    assert _bytes(caches.conv) == conv


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
