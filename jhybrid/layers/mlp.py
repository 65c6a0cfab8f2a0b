"""Gated feed-forward block: down(act(gate(x), up(x)))."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float, Int32

from ..config import Activation
from ..params import weight
from .linear import gated_project, reduce_project
from .norm import Normed

SITU_GATE_BOUND, SITU_UP_BOUND = 4.0, 25.0


@struct.dataclass
class MLPParams:
    gate_up: Any  # [2, F, D]: gate rows, then up rows
    down: Any  # [D, F]


def mlp_specs(hidden: int, width: int) -> MLPParams:
    return MLPParams(
        gate_up=weight((2, None), (width, "ffn"), (hidden, None), fan_in=hidden),
        down=weight((hidden, None), (width, "ffn"), fan_in=width),
    )


def gated_activation(
    gate: Float[Array, ...], up: Float[Array, ...], kind: Activation
) -> Float[Array, ...]:
    """silu(gate) up, or Kimi-K3's SiTU: 4 tanh(gate/4) sigmoid(gate) * 25 tanh(up/25)."""
    if kind == "silu":
        return jax.nn.silu(gate) * up
    bounded = SITU_GATE_BOUND * jnp.tanh(gate / SITU_GATE_BOUND) * jax.nn.sigmoid(gate)
    return bounded * SITU_UP_BOUND * jnp.tanh(up / SITU_UP_BOUND)


@functools.cache
def activation_of(kind: Activation) -> Callable[[Array, Array], Array]:
    """The same function for a kind, so that a program lowers its kernels once."""
    return functools.partial(gated_activation, kind=kind)


def mlp(
    params: MLPParams,
    x: Float[Array, "... D"] | Normed,
    kind: Activation,
    residual: Float[Array, "... D"] | None = None,
    count: Int32[Array, ""] | None = None,
) -> Float[Array, "... D"]:
    """The block's result, plus the residual; of a prefill's rows the first `count` are wanted."""
    h = gated_project(x, params.gate_up, activation_of(kind), count)
    return reduce_project(h, params.down, residual)
