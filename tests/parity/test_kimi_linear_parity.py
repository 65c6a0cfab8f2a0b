"""Tiny random Kimi-Linear checkpoints against transformers, live."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("torch", reason="live parity needs the extra `parity`")

from jhybrid.convert.__main__ import main
from jhybrid.convert.verify import dense_logits, torch_logits
from jhybrid.demo import MODELS
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.sharding import make_mesh
from jhybrid.weights import load_hf_params, load_params, named
from tests.greedy import assert_greedy
from tests.hf_fixtures import Case, greedy, routing_gap
from tests.kimi_fixtures import CASES, SMALL, make_checkpoint, text_config, to_hub, to_memory
from tests.stepping import cached_logits

PROMPT, NEW = 15, 64


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout(case: Case, tmp_path: Path, mesh: Mesh) -> None:
    """Logits and greedy tokens of the layout transformers writes; the others hold the same."""
    src, dst = make_checkpoint(tmp_path / "hf", case), tmp_path / "out"
    assert main([str(src), str(dst)]) == 0
    config = model_config(read_hf_config(dst))
    params = load_params(dst, config, mesh, jnp.float32)
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, PROMPT + NEW))
    assert routing_gap(src, token_ids) > 1e-5
    found = dense_logits(params, token_ids, config, mesh)
    np.testing.assert_allclose(found, torch_logits(src, token_ids), rtol=0, atol=2e-5)
    prompt = token_ids[0, :PROMPT]
    continuation = np.array(greedy(src, prompt, NEW))
    assert routing_gap(src, np.concatenate([prompt, continuation])[None]) > 1e-5
    assert_greedy(params, prompt, continuation, config, mesh)

    for write, name in ((to_hub, "hub"), (to_memory, "memory")):
        folder = write(src, tmp_path / name, text_config(case))
        assert model_config(read_hf_config(folder)) == config
        other = named(load_hf_params(folder, config, mesh, jnp.float32))
        for key, value in named(params).items():
            np.testing.assert_array_equal(np.asarray(other[key]), np.asarray(value), err_msg=key)


def test_cut_over_ranks_and_split_anywhere(tmp_path: Path) -> None:
    src = make_checkpoint(tmp_path / "hf", SMALL)
    config = model_config(read_hf_config(src))
    token_ids = np.random.default_rng(2).integers(0, config.vocab_size, 79)
    expected = torch_logits(src, token_ids[None])[0]
    assert config.tensor_parallel_sizes() == [1, 2, 4]
    pieces = {1: ((79,), (1,), (1, 77), (64, 8)), 2: ((79,), (13, 51)), 4: ((79,), (65, 3))}
    for tp, splits in pieces.items():
        mesh = make_mesh(tp)
        params = load_hf_params(src, config, mesh, jnp.float32)
        for split in splits:
            found = cached_logits(params, token_ids, config, mesh, split)
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=f"{tp} {split}")


def test_odd_sizes_through_caches(tmp_path: Path, mesh: Mesh) -> None:
    src = make_checkpoint(tmp_path / "hf", CASES[2])
    config = model_config(read_hf_config(src))
    token_ids = np.random.default_rng(2).integers(0, config.vocab_size, 79)
    params = load_hf_params(src, config, mesh, jnp.float32)
    found = cached_logits(params, token_ids, config, mesh, (1, 40, 33))
    expected = torch_logits(src, token_ids[None])[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_safe_gate_is_that_of_glm5_next() -> None:
    import torch
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    from jhybrid.config import LinearAttentionConfig
    from jhybrid.layers.delta_rule import gate_activation

    heads, dim, hidden = 3, 8, 16
    shape = {"linear_head_dim": dim, "linear_num_heads": heads, "linear_lower_bound": -5.0}
    torch.manual_seed(0)
    gate = Glm5NextTextForgetGate(Glm5NextTextConfig(hidden_size=hidden, **shape))
    for weight in gate.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 7, hidden)
    expected = gate(x).detach().numpy()
    z = jnp.asarray(gate.f_b_proj(gate.f_a_proj(x)).detach().numpy()).reshape(2, 7, heads, dim)
    A_log, bias = (jnp.asarray(x.detach().numpy()) for x in (gate.A_log, gate.dt_bias))
    c = LinearAttentionConfig("kda", heads, heads, dim, dim, gate="safe", low_rank=dim)
    found = gate_activation(c).log_decay(z, A_log[:, None], bias.reshape(heads, dim))
    assert -5 <= expected.min() < expected.max() <= 0
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)
    assert jax.eval_shape(lambda: found).dtype == jnp.float32


def test_verify_of_the_bundled_model(tmp_path: Path) -> None:
    """In bfloat16, where convolutions and decays stay as exact as the file has them."""
    source = str(MODELS["demo-kda"])
    assert main([source, str(tmp_path / "out"), "--verify", "--dtype", "bfloat16"]) == 0
