"""What the ops take: packed projections and the logits of the gates.

A mixer's convolution leaves queries, keys and values in one array, key head by key head. The ops
read it as it is: slicing it first would write every one of them to memory again. Likewise gates
come as logits, and no activation is ever stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ..precision import working_dtype


class Gates(NamedTuple):
    """Logits of each token, and what turns them into log-decays (L: of several layers).

    Per head (GDN), or per key channel (KDA) with a last axis K in `decay` and `dt_bias`.
    """

    decay: Float[Array, "*T H *K"]
    beta: Float[Array, "*T H"]
    A_log: Float[Array, "*L H"]
    dt_bias: Float[Array, "*L H *K"]


@dataclass(frozen=True)
class Activation:
    """g = -exp(A_log) softplus(z + dt_bias), or the safe gate with its bound < 0,
    g = lower_bound sigmoid(exp(A_log) (z + dt_bias));  beta = beta_scale sigmoid(logit)."""

    lower_bound: float | None = None
    beta_scale: float = 1.0

    def log_decay(self, z: Array, A_log: Array, dt_bias: Array) -> Array:
        """In the arguments' dtype, float32 or wider."""
        rate, z = jnp.exp(A_log), z + dt_bias
        if self.lower_bound is not None:
            return self.lower_bound * jax.nn.sigmoid(rate * z)
        return -rate * (jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z))))

    def strength(self, logits: Array) -> Array:
        """beta"""
        return self.beta_scale * jax.nn.sigmoid(logits)


SOFTPLUS = Activation()

Five = tuple[Array, Array, Array, Array, Array]


def unpack(
    qkv: Float[Array, "*T Hk W"],
    gates: Gates,
    key_dim: int,
    activation: Activation = SOFTPLUS,
) -> Five:
    """q, k [*T, Hk, K], v [*T, H, V], g, beta; W = 2 K + (H / Hk) V.

    The gates are float32 (float64 for float64 inputs) whatever the inputs are.
    """
    work = working_dtype(qkv)
    decay, beta, A_log, dt_bias = (x.astype(work) for x in gates)
    heads, lead = beta.shape[-1], qkv.shape[:-2]
    q, k = qkv[..., :key_dim], qkv[..., key_dim : 2 * key_dim]
    v = qkv[..., 2 * key_dim :].reshape(*lead, heads, -1)
    if dt_bias.ndim > A_log.ndim:
        A_log = A_log[..., None]
    g = activation.log_decay(decay, A_log, dt_bias)
    return q, k, v, g, activation.strength(beta)


def value_dim_of(qkv: Array, key_dim: int, heads: int) -> int:
    """V, from the width of the packed heads."""
    key_heads, width = qkv.shape[-2:]
    values = (width - 2 * key_dim) * key_heads
    if heads % key_heads or values <= 0 or values % heads:
        raise ValueError(
            f"qkv has {key_heads} heads of {width} channels; expected a divisor of {heads} heads, "
            f"each of two times {key_dim} channels and the values of its group"
        )
    return values // heads
