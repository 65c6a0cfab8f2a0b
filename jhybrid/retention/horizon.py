"""How long each unit of recurrent state remembers, from the decay gates in the weights alone.

    g_s = -exp(A_log) softplus(a_s + d)            (softplus gate)
    g_s = bound sigmoid(exp(A_log) (a_s + d))      (safe gate)           (dasc eq. 2)
    H_s = ln(epsilon) / g_s  tokens                                      (dasc eq. 3)

A unit is a value head of a GDN layer or a (head, key channel) of a KDA layer. Analysis runs in
float64 numpy, once, before serving.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from ..config import LinearAttentionConfig, ModelConfig, require
from ..horizons import DecayBias
from ..models.specs import ModelParams
from ..params import ParamSpec
from ..weights import named

EPSILON = 1e-3
GATE_INPUT = {"softplus": -0.3, "safe": 0.8}  # a_s of dasc section 3.3, by gate


@dataclass(frozen=True, eq=False)
class Horizons:
    """Horizons in tokens of all units of the linear layers: [Ll, H, U] float64, > 0, maybe inf.

    U is 1 where a head is a unit (GDN), else the key channels. `rows` is how many rows of the
    state (l, h, k) one unit holds. `digest` identifies the decay parameters they come from.
    """

    values: Float[np.ndarray, "Ll H U"]
    rows: int
    gate_input: float
    epsilon: float
    digest: str

    @property
    def unit(self) -> Literal["head", "channel"]:
        return "channel" if self.rows == 1 else "head"

    @property
    def decay(self) -> Float[np.ndarray, "Ll H U"]:
        """One-step static decay alpha_s = exp(g_s)."""
        return np.exp(math.log(self.epsilon) / self.values)


def is_decay(spec: ParamSpec) -> bool:
    """Whether a parameter is one of `decay_names`, for random weights of which no others exist."""
    return spec.init in ("decay_scale", "decay_bias") or isinstance(spec.init, DecayBias)


def decay_names(config: ModelConfig) -> list[str]:
    """The parameters that horizons are made of, as `jhybrid.weights.named` spells them."""
    leaves = ("A_log", "dt_bias")
    return [f"layers.{i}.mixer.{leaf}" for i in config.linear_layers for leaf in leaves]


def static_horizons(
    params: ModelParams | Mapping[str, Any],
    config: ModelConfig,
    *,
    gate_input: float | None = None,
    epsilon: float = EPSILON,
) -> Horizons:
    """Horizons of every unit. Of the parameters (or a dictionary by name) only decays are read.

    `gate_input` is a_s; None is the paper's value for the model's gate.
    """
    require(0 < epsilon < 1, "epsilon", epsilon, "a number between 0 and 1")
    linear = config.linear
    a_s = GATE_INPUT[linear.gate] if gate_input is None else gate_input
    require(math.isfinite(a_s), "a_s", a_s, "a finite number")
    found = params if isinstance(params, Mapping) else named(params)
    values = {name: np.asarray(found[name], np.float32) for name in decay_names(config)}
    for name, value in values.items():
        require(bool(np.isfinite(value).all()), name, "nan or inf", "finite decay parameters")
    layers = []
    for i in config.linear_layers:
        scale = values[f"layers.{i}.mixer.A_log"].reshape(linear.value_heads, 1)
        bias = values[f"layers.{i}.mixer.dt_bias"].reshape(linear.value_heads, linear.decay_width)
        layers.append(static_log_decay(scale, bias, a_s, linear))
    with np.errstate(divide="ignore"):  # a decay that rounds to 1 is never forgotten
        horizons = math.log(epsilon) / np.stack(layers)
    rows = 1 if linear.kind == "kda" else linear.key_dim
    return Horizons(horizons, rows, float(a_s), float(epsilon), _digest(values))


def static_log_decay(
    A_log: Float[np.ndarray, "H 1"],
    dt_bias: Float[np.ndarray, "H U"],
    gate_input: float,
    config: LinearAttentionConfig,
) -> Float[np.ndarray, "H U"]:
    """g_s <= 0 of eq. 2, in float64."""
    rate = np.exp(A_log.astype(np.float64))
    z = gate_input + dt_bias.astype(np.float64)
    if config.gate == "safe":
        return config.gate_lower_bound * np.exp(-np.logaddexp(0, -rate * z))
    return -rate * np.logaddexp(0, z)


def _digest(values: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names, shapes and float32 contents, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.astype("<f4").tobytes())
    return f"sha256:{digest.hexdigest()}"
