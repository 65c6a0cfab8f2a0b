"""Decay parameters of random weights, drawn so that state compression is as published models'.

The retention horizon of a unit (a value head of a GDN layer, a (head, key channel) of a KDA layer)
is H = ln(1e-3) / g(a_s), g being its gate at a representative input a_s. The dasc paper gives, for
three models, the checkpoint capacity C(w) when only units of H > w are kept, and the median decay.
With conv bytes r for each byte of recurrent state (its eq. 6),

    C = (1 + r) / (kept + r),  so  kept(w) = (1 + r) / C(w) - r

which, with a shortest and a longest horizon of our choice, are points of the distribution function
of H. Between them log H is linear. Units of one layer, and of one head, are alike: a unit's rank is
a normal score made of a layer's, a head's and its own, in shares that give about the published
spread of kept fractions over layers and heads. Every score is stratified, so kept fractions hold
for a model as a whole and not only on average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtr, ndtri

LOG_EPSILON = math.log(1e-3)
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fill (0, 1) evenly, however many there are
FIRST_LAYER = 0.27  # where they start: the evenest for 20 to 69 layers


@dataclass(frozen=True)
class HorizonDistribution:
    """`points` are (tokens, share of units whose horizon is at most that), increasing in both.

    `layer_share` and `head_share` are parts of the variance of a unit's normal score.
    """

    points: tuple[tuple[float, float], ...]
    gate_input: float
    layer_share: float
    head_share: float

    def __post_init__(self) -> None:
        tokens, shares = zip(*self.points, strict=True)
        for values in (tokens, shares):
            if list(values) != sorted(set(values)):
                raise ValueError(f"points: expected increasing values, got {self.points}")
        if (shares[0], shares[-1]) != (0, 1):
            raise ValueError(f"points: expected shares from 0 to 1, got {self.points}")

    def sample(self, key: Array, heads: int, channels: int, index: Array) -> Array:
        """Horizons [heads, channels] of layer number `index`; one channel where heads are units."""
        head_key, unit_key = jax.random.split(key)
        layer = ndtri(jnp.modf(FIRST_LAYER + index.astype(jnp.float32) * GOLDEN)[0])
        head = _normal_scores(head_key, (1, heads)).reshape(heads, 1)
        own = _normal_scores(unit_key, (heads, channels))
        own_share = 1 - self.layer_share - self.head_share
        score = math.sqrt(self.layer_share) * layer + math.sqrt(self.head_share) * head
        score += math.sqrt(own_share) * own
        tokens, shares = (jnp.array(x, jnp.float32) for x in zip(*self.points, strict=True))
        return jnp.exp(jnp.interp(ndtr(score), shares, jnp.log(tokens)))


@dataclass(frozen=True)
class DecayBias:
    """Initialiser of `dt_bias` for A_log = 0: the gate's inverse at horizons of a distribution."""

    distribution: HorizonDistribution
    per_channel: bool
    gate: Literal["softplus", "safe"]
    lower_bound: float

    def __call__(self, key: Array, shape: tuple[int, ...], index: Array) -> Array:
        channels = shape[-1] if self.per_channel else 1
        heads = math.prod(shape) // channels
        horizon = self.distribution.sample(key, heads, channels, index).reshape(shape)
        rate = -LOG_EPSILON / horizon
        if self.gate == "softplus":
            inverse = jnp.log(jnp.expm1(rate))
        else:
            open_ = rate / -self.lower_bound
            inverse = jnp.log(open_) - jnp.log1p(-open_)
        return inverse - self.distribution.gate_input


def _normal_scores(key: Array, shape: tuple[int, int]) -> Array:
    """Along the last axis, one normal score from each of as many equally likely intervals."""
    order_key, place_key = jax.random.split(key)
    order = jnp.argsort(jax.random.uniform(order_key, shape), axis=-1).astype(jnp.float32)
    place = jax.random.uniform(place_key, shape, minval=1e-3, maxval=1 - 1e-3)
    return ndtri((order + place) / shape[-1])


def kept_share(capacity: float, conv_ratio: float) -> float:
    """The share of units that are kept at a checkpoint capacity, with conv bytes (eq. 6)."""
    return (1 + conv_ratio) / capacity - conv_ratio


def _published(
    capacities: Mapping[int, float],
    *,
    conv_ratio: float,
    median_decay: float,
    ends: tuple[float, float],
    gate_input: float,
    layer_share: float,
    head_share: float,
) -> HorizonDistribution:
    points = {float(w): 1 - kept_share(c, conv_ratio) for w, c in capacities.items()}
    points[LOG_EPSILON / math.log(median_decay)] = 0.5
    points |= {ends[0]: 0.0, ends[1]: 1.0}
    return HorizonDistribution(tuple(sorted(points.items())), gate_input, layer_share, head_share)


QWEN3_NEXT_CAPACITY = {16: 1.10, 64: 1.32, 128: 1.60, 512: 2.49}
KIMI_LINEAR_CAPACITY = {16: 2.64, 64: 7.06, 128: 14.72, 512: 28.24}
KIMI_K3_CAPACITY = {64: 1.61, 128: 2.01, 512: 3.48}

QWEN3_NEXT = _published(
    QWEN3_NEXT_CAPACITY,
    conv_ratio=3 * 8192 * 2 / (32 * 128 * 128 * 4),
    median_decay=0.969,
    ends=(2.0, 65536.0),
    gate_input=-0.3,
    layer_share=0.05,
    head_share=0.95,  # a head is a unit
)
KIMI_LINEAR = _published(
    KIMI_LINEAR_CAPACITY,
    conv_ratio=3 * 12288 * 2 / (32 * 128 * 128 * 4),
    median_decay=0.471,
    ends=(1.0, 4096.0),
    gate_input=-0.3,
    layer_share=0.07,
    head_share=0.83,
)
KIMI_K3 = _published(
    KIMI_K3_CAPACITY,
    conv_ratio=3 * 36864 * 2 / (96 * 128 * 128 * 4),
    median_decay=0.942,
    ends=(1.5, 65536.0),  # the safe gate cannot decay faster than 1.38 tokens
    gate_input=0.8,
    layer_share=0.065,
    head_share=0.41,
)
