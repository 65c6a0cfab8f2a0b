"""Gated feed-forward block: down(act(gate(x), up(x)))."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float

from pallas_kernels.precision import working_dtype

from ..config import Activation
from ..params import weight
from .linear import project, reduce_project

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
    work = working_dtype(gate)
    a, b = gate.astype(work), up.astype(work)
    if kind == "silu":
        return (jax.nn.silu(a) * b).astype(gate.dtype)
    a = SITU_GATE_BOUND * jnp.tanh(a / SITU_GATE_BOUND) * jax.nn.sigmoid(a)
    return (a * SITU_UP_BOUND * jnp.tanh(b / SITU_UP_BOUND)).astype(gate.dtype)


def mlp(params: MLPParams, x: Float[Array, "... D"], kind: Activation) -> Float[Array, "... D"]:
    both = project(x, params.gate_up)  # [..., 2, F]
    return reduce_project(gated_activation(both[..., 0, :], both[..., 1, :], kind), params.down)
