"""Static horizons against the equations, and that only decay parameters are read."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.config import ModelConfig
from jhybrid.models.specs import model_specs
from jhybrid.params import init_params
from jhybrid.presets import preset
from jhybrid.retention.horizon import decay_names, static_horizons
from jhybrid.sharding import make_mesh
from jhybrid.weights import named

from .plans import tiny_model, tiny_params


def decays(seed: int = 0, **linear: float | str) -> tuple[dict[str, np.ndarray], ModelConfig]:
    kind = str(linear.pop("kind"))
    config = tiny_model(kind, **linear)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    specs = named(model_specs(config))
    made = {n: rng.normal(0, 1.5, specs[n].shape).astype(np.float32) for n in decay_names(config)}
    return made, config


@pytest.mark.parametrize("gate", ["softplus", "safe"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_equations_2_and_3(kind: str, gate: str) -> None:
    params, config = decays(kind=kind, gate=gate, gate_lower_bound=-5.0)
    a_s = {"softplus": -0.3, "safe": 0.8}[gate]
    for given, expected in ((None, a_s), (0.25, 0.25)):
        found = static_horizons(params, config, gate_input=given, epsilon=1e-2)
        assert (found.gate_input, found.epsilon) == (expected, 1e-2)
        for index, layer in enumerate((0, 2, 3)):
            A_log = params[f"layers.{layer}.mixer.A_log"].ravel()
            bias = params[f"layers.{layer}.mixer.dt_bias"].reshape(len(A_log), -1)
            for head in range(len(A_log)):
                for unit in range(bias.shape[1]):
                    rate = math.exp(A_log[head])
                    z = expected + float(bias[head, unit])
                    if gate == "safe":
                        g = -5.0 / (1 + math.exp(-rate * z))
                    else:
                        g = -rate * math.log1p(math.exp(z))
                    horizon = found.values[index, head, unit]
                    assert math.isclose(horizon, math.log(1e-2) / g, rel_tol=1e-9)
                    assert math.isclose(found.decay[index, head, unit], math.exp(g), rel_tol=1e-9)


def test_units_of_each_kind() -> None:
    for kind, shape, rows, unit in (
        ("gdn", (3, 16, 1), 4, "head"),
        ("kda", (3, 8, 4), 1, "channel"),
    ):
        found = static_horizons(*decays(kind=kind))
        assert (found.values.shape, found.rows, found.unit) == (shape, rows, unit)


def test_from_a_parameter_tree_of_any_sharding() -> None:
    config = tiny_model("kda")
    params = tiny_params(config, tp=4)
    by_name = {name: named(params)[name] for name in decay_names(config)}
    a, b = static_horizons(params, config), static_horizons(by_name, config)
    np.testing.assert_array_equal(a.values, b.values)
    assert a.digest == b.digest


def test_no_decay_is_never_forgotten() -> None:
    params, config = decays(kind="gdn")
    params["layers.0.mixer.dt_bias"][0] = -1e5
    assert np.isinf(static_horizons(params, config).values[0, :2]).all()


def test_digest_is_of_the_decay_parameters() -> None:
    params, config = decays(kind="kda")
    digest = static_horizons(params, config).digest
    assert static_horizons(params, config, gate_input=1.0).digest == digest
    params["layers.3.mixer.A_log"] = np.nextafter(params["layers.3.mixer.A_log"], np.inf)
    assert static_horizons(params, config).digest != digest


def test_bad_input_is_named() -> None:
    params, config = decays(kind="kda")
    with pytest.raises(ValueError, match="epsilon: expected a number between 0 and 1, got 1.5"):
        static_horizons(params, config, epsilon=1.5)
    with pytest.raises(ValueError, match="a_s: expected a finite number"):
        static_horizons(params, config, gate_input=math.nan)
    params["layers.2.mixer.dt_bias"][1, 1] = np.nan
    with pytest.raises(ValueError, match=r"layers\.2\.mixer\.dt_bias: expected finite"):
        static_horizons(params, config)


def test_safe_gate_is_that_of_the_preset() -> None:
    config = preset("kimi-k3-slice")
    specs = {n: named(model_specs(config))[n] for n in decay_names(config)}
    params = init_params(specs, jax.random.key(0), jnp.bfloat16, make_mesh(1))
    found = static_horizons(params, config)
    assert found.gate_input == 0.8
    assert abs(np.median(found.decay) - 0.942) < 0.01
    softplus = replace(config, linear=replace(config.linear, gate="softplus"))
    assert not np.allclose(static_horizons(params, softplus).values, found.values)
