"""Every family: layouts told by tensor names, and wrong input named before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jhybrid.convert.__main__ import main
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.hf_config import model_config
from tests.synthetic import TINY, published_tensors, write_hf

MOE = TINY | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
NEXT = MOE | {"model_type": "qwen3_next"}
OLMO = {
    "model_type": "olmo_hybrid",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
CONFIGS = {"qwen3_5_moe": MOE, "qwen3_next": NEXT, "olmo_hybrid": OLMO}


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint of a family whose tensors or config were changed."""

    def make(family: str, change: Callable[[dict[str, Any]], Any], **config: Any) -> Path:
        folder = write_hf(tmp_path / "hf", CONFIGS[family])
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIGS[family] | config))
        return folder

    return make


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a conversion, which has left nothing behind."""
    assert main([str(folder), str(folder.parent / "out")]) == 2
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]
    return capsys.readouterr().err


def test_layouts_that_exports_are_written_in() -> None:
    """The hub's: experts one by one and packed projections, or fused and flat."""
    names = {family: set(published_tensors(config)) for family, config in CONFIGS.items()}
    layer = "model.layers.0."
    assert layer + "mlp.experts.3.down_proj.weight" in names["qwen3_next"]
    assert layer + "linear_attn.in_proj_qkvz.weight" in names["qwen3_next"]
    assert layer + "mlp.experts.gate_up_proj" in names["qwen3_5_moe"]
    assert layer + "linear_attn.in_proj_qkv.weight" in names["qwen3_5_moe"]
    assert layer + "linear_attn.k_conv1d.weight" in names["olmo_hybrid"]
    assert "model.layers.3.post_feedforward_layernorm.weight" in names["olmo_hybrid"]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_tensor_is_used_once(family: str, edit: Callable[..., Path]) -> None:
    open_checkpoint(edit(family, lambda tensors: None))
    for surprise in ("model.layers.1.mlp.experts.9.up_proj.weight", "model.layers.0.extra"):
        folder = edit(family, lambda tensors, name=surprise: tensors.update({name: np.ones(2)}))
        with pytest.raises(ValueError, match=rf"\(1\):\n  tensor {surprise} \[2\] is left over"):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_5_moe", "model.layers.2.mlp.experts.down_proj"),
        ("qwen3_next", "model.layers.0.mlp.experts.1.up_proj.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("olmo_hybrid", "model.layers.0.post_attention_layernorm.weight"),
        ("olmo_hybrid", "model.layers.3.self_attn.q_norm.weight"),
    ],
)
def test_missing_tensor(
    family: str, name: str, edit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(edit(family, lambda tensors: tensors.pop(name)), capsys)
    assert f"tensor {name} [" in error and "is missing" in error


def test_experts_that_the_config_does_not_have(
    edit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(edit("qwen3_5_moe", lambda tensors: None, num_experts=3), capsys)
    assert (
        "tensor model.layers.0.mlp.experts.gate_up_proj in model.safetensors: "
        "expected shape [3, 16, 32], found [4, 16, 32]" in error
    )
    error = refused(edit("qwen3_next", lambda tensors: None, num_experts=3), capsys)
    assert "tensor model.layers.0.mlp.experts.3.gate_proj.weight [8, 32] is left over" in error


def test_float8_is_refused_in_one_sentence(
    edit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def quantize(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = np.ones((1, 1), np.float32)

    error = refused(edit("qwen3_next", quantize), capsys)
    assert "model.safetensors: tensor 'model.layers.0.mlp.experts.0." in error
    assert "is float8_e4m3fn (48 of " in error and "not quantized" in error
    assert len(error.splitlines()) == 1


def test_convolution_that_is_neither_true_nor_in_thirds(
    edit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.0.linear_attn.q_conv1d.weight"
    folder = edit("olmo_hybrid", lambda t: t.update({name: np.ones((25, 1, 4), np.float32)}))
    error = refused(folder, capsys)
    assert f"tensor {name} in model.safetensors: expected shape [24, 1, 4] or [32, 1, 4]" in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MOE | {"num_experts_per_tok": 5}, r"top_k: expected 1 to experts \(4\), got 5"),
        (NEXT | {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive number"),
        (NEXT | {"hidden_act": "gelu"}, "hidden_act: expected silu, got 'gelu'"),
        (NEXT | {"rope_scaling": {"type": "yarn"}}, "rope_type: expected default .*'yarn'"),
        (OLMO | {"attention_bias": True}, "attention_bias: expected false, got True"),
        (OLMO | {"layer_types": ["sliding"] * 4}, "layer_types: expected only"),
        (OLMO | {"rope_theta": "10000"}, "rope_theta: expected a number or null"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(config)


def test_olmo_rotates_only_with_a_numeric_theta() -> None:
    for none in ({}, {"rope_parameters": None}, {"rope_parameters": {"rope_theta": None}}):
        assert model_config(OLMO | none).full.rotary_dim == 0  # type: ignore[union-attr]
    for some in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 500000}}):
        full = model_config(OLMO | some).full
        assert (full.rotary_dim, full.rope_theta) == (8, 5e5)  # type: ignore[union-attr]


def test_layers_without_experts() -> None:
    config = model_config(NEXT | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer.feed_forward for layer in config.layers] == ["mlp", "moe", "mlp", "mlp"]
    assert config.mlp_width == 48
    assert model_config(NEXT).mlp_width == 0  # no dense layer
    assert model_config(NEXT | {"num_experts": 0}).moe is None
