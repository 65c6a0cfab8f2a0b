"""Kimi configs: told apart by what they are, and refused where they contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest

from jhybrid.hf_config import model_config
from jhybrid.presets import PRESETS
from tests.k3_fixtures import CONFIG

LINEAR, K3 = PRESETS["kimi-linear-48b"], CONFIG["text_config"]


def test_safe_gate_is_of_kimi_k3_alone() -> None:
    """transformers and Kimi-Linear's own code do not read a bound that its config may state."""
    lists = LINEAR["linear_attn_config"] | {"gate_lower_bound": -5.0}
    config = model_config(LINEAR | {"linear_attn_config": lists})
    assert (config.family, config.linear.gate) == ("kimi_linear", "softplus")
    for k3 in (CONFIG, K3):
        config = model_config(k3)
        assert (config.family, config.linear.gate) == ("kimi_k3", "safe")
        assert config.linear.gate_lower_bound == -5


def test_layers_are_counted_from_one() -> None:
    config = model_config(LINEAR)
    assert config.full_layers == (3, 7, 11, 15, 19, 23, 26)
    assert [layer.feed_forward for layer in config.layers] == ["mlp"] + ["moe"] * 26


def test_layer_lists_may_be_spelt_out() -> None:
    kinds = {
        "linear": "linear_attention",
        "full": "full_attention",
        "mlp": "dense",
        "moe": "sparse",
    }
    layers = model_config(LINEAR).layers
    spelt = {
        "layer_types": [kinds[layer.mixer] for layer in layers],
        "mlp_layer_types": [kinds[layer.feed_forward] for layer in layers],
    }
    assert model_config(LINEAR | spelt) == model_config(LINEAR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope: expected true"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu or situ, got 'gelu'"),
        ({"activation_situ_beta": 3.0}, r"activation_situ_beta: expected 4\.0, got 3\.0"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: expected sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
        ({"num_hidden_layers": 10}, "each layer from 1 to 10 in one of full_attn_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 9 entries"),
        ({"num_experts_per_token": 9}, r"top_k: expected 1 to experts \(8\), got 9"),
        ({"kv_lora_rank": None}, "kv_lora_rank: expected"),
    ],
)
def test_contradictions_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(K3 | change)
    with pytest.raises(ValueError, match=message):
        model_config(CONFIG | {"text_config": K3 | change})
