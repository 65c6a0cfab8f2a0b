"""The mixture of experts against float64 numpy written from its formulas, one token at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jhybrid.layers.moe
from jhybrid.config import Activation, MoEConfig
from jhybrid.layers.moe import MoEParams, moe, moe_specs, sort_by_expert
from jhybrid.params import ParamSpec, map_specs, partition_specs
from jhybrid.sharding import REPLICATED, make_mesh, sharded

HIDDEN = 24

QWEN = MoEConfig(8, 3, 16, 12, shared_gate=True, scoring="softmax")
KIMI = MoEConfig(8, 2, 16, 8, shared_gate=False, scoring="sigmoid", scaling=2.446)
K3 = MoEConfig(12, 4, 8, 16, False, "sigmoid", latent_width=20, latent_norm=True, norm_eps=1e-5)
CASES: dict[str, tuple[MoEConfig, Activation]] = {
    "qwen": (QWEN, "silu"),
    "qwen_not_renormalised": (
        MoEConfig(8, 3, 16, 12, shared_gate=True, scoring="softmax", renormalize=False),
        "silu",
    ),
    "kimi": (KIMI, "silu"),
    "kimi_groups": (
        MoEConfig(12, 3, 16, 8, False, "sigmoid", scaling=2.0, groups=4, top_groups=2),
        "silu",
    ),
    "kimi_k3": (K3, "situ"),
    "no_shared_expert": (MoEConfig(4, 1, 8, 0, False, "softmax"), "silu"),
}


def random_params(config: MoEConfig) -> MoEParams:
    """Every parameter random, norms and biases included; scores far from ties."""
    rng = np.random.default_rng(1)

    def one(spec: ParamSpec) -> np.ndarray:
        noise = rng.standard_normal(spec.shape)
        value = 1 + 0.1 * noise if spec.init == "ones" else 2 * spec.fan_in**-0.5 * noise
        return value.astype(np.float32)

    return map_specs(one, moe_specs(HIDDEN, config))


def oracle(p: Any, x: np.ndarray, c: MoEConfig, activation: Activation) -> np.ndarray:
    """x [T, D]."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)

    def sigmoid(v: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-v))

    def expert(gate_up: np.ndarray, down: np.ndarray, v: np.ndarray) -> np.ndarray:
        a, b = gate_up[0] @ v, gate_up[1] @ v
        if activation == "silu":
            return down @ (a * sigmoid(a) * b)
        return down @ (4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25))

    def token(v: np.ndarray) -> np.ndarray:
        logits = p.router @ v
        if c.scoring == "softmax":
            scores = wanted = np.exp(logits) / np.exp(logits).sum()
        else:
            scores = sigmoid(logits)
            wanted = scores + p.bias
        if c.groups > 1:
            grouped = wanted.reshape(c.groups, -1)
            best = np.argsort(-np.sort(grouped)[:, -2:].sum(-1))[: c.top_groups]
            wanted = np.where(np.isin(np.arange(c.groups), best)[:, None], grouped, -np.inf)
        chosen = np.argsort(-wanted.reshape(-1))[: c.top_k]
        total = scores[chosen].sum() if c.renormalize else 1
        inner = v if p.latent is None else p.latent.down @ v
        y = sum(
            c.scaling * scores[e] / total * expert(p.gate_up[e], p.down[e], inner) for e in chosen
        )
        if p.latent is not None:
            y = p.latent.up @ (p.latent.norm * y / np.sqrt((y**2).mean() + c.norm_eps))
        if p.shared is not None:
            gate = 1 if p.shared_gate is None else sigmoid(p.shared_gate @ v)
            y = y + gate * expert(p.shared.gate_up, p.shared.down, v)
        return np.asarray(y)

    return np.stack([token(v) for v in x.astype(np.float64)])


def run(params: MoEParams, x: np.ndarray, case: str, mesh: Mesh) -> np.ndarray:
    config, activation = CASES[case]
    specs = partition_specs(moe_specs(HIDDEN, config))
    fn = sharded(lambda p, v: moe(p, v, config, activation), mesh, (specs, REPLICATED), REPLICATED)
    return np.asarray(jax.jit(fn)(params, x))


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_formulas(case: str, mesh: Mesh) -> None:
    params = random_params(CASES[case][0])
    for count in (1, 37):  # each row its experts' weights; tiles
        x = tokens(count)
        expected = oracle(params, x, *CASES[case])
        np.testing.assert_allclose(run(params, x, case, mesh), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", ["qwen", "kimi", "kimi_k3"])
def test_every_mesh_gives_the_same(case: str, mesh: Mesh) -> None:
    params, x = random_params(CASES[case][0]), tokens(29)
    whole = run(params, x, case, mesh)
    for tp in (2, 4):
        cut = run(params, x, case, make_mesh(tp))
        np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-5)


def test_experts_filled_up_to_whole_tiles(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    params, x = random_params(QWEN), tokens(37)
    expected = run(params, x, "qwen", mesh)
    monkeypatch.setattr(jhybrid.layers.moe, "preferred_alignment", lambda *args: 8)
    np.testing.assert_allclose(run(params, x, "qwen", mesh), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("aligned", [1, 8])
def test_sorts_tokens_by_expert(aligned: int) -> None:
    """Expert 2 is chosen by nobody, and 5 by all."""
    others = np.random.default_rng(0).choice([0, 1, 3, 4], 21).astype(np.int32)
    experts = np.stack([others, np.full(21, 5, np.int32)], axis=1)
    found = sort_by_expert(jax.numpy.asarray(experts), 6, aligned)
    sizes, rows, places = map(np.asarray, found[:3])
    counts = np.bincount(experts.ravel(), minlength=6)
    np.testing.assert_array_equal(sizes, -(-counts // aligned) * aligned)
    assert len(rows) % aligned == 0 and len(rows) >= sizes.sum()
    assert len(set(places)) == 42
    np.testing.assert_array_equal(rows[places], np.repeat(np.arange(21), 2))
    expert_of_row = np.repeat(np.arange(6), sizes)
    np.testing.assert_array_equal(expert_of_row[places], experts.ravel())
    if found.groups is None:
        assert aligned > 1
    else:
        np.testing.assert_array_equal(np.asarray(found.groups), expert_of_row)


def test_batch_axes(mesh: Mesh) -> None:
    params, x = random_params(QWEN), tokens(30)
    flat = run(params, x, "qwen", mesh)
    batched = run(params, x.reshape(2, 15, HIDDEN), "qwen", mesh)
    np.testing.assert_array_equal(batched.reshape(flat.shape), flat)


def test_a_token_does_not_depend_on_its_neighbours(mesh: Mesh) -> None:
    """The same token in other batches, among them one whose other rows are padding."""
    params, x = random_params(KIMI), tokens(33)
    seen = []
    for place, seed in ((0, 1), (17, 2), (32, 3)):
        batch = tokens(33, seed) if seed < 3 else np.zeros_like(x)
        batch[place] = x[0]
        seen.append(run(params, batch, "kimi", mesh)[place])
    for found in seen[1:]:
        np.testing.assert_allclose(found, seen[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, r"top_k: expected 1 to experts \(8\), got 9"),
        ({"groups": 3}, "groups: expected a divisor of 8, got 3"),
        ({"groups": 4, "top_groups": 1}, "top_groups: expected .* 3 experts among them, got 1"),
    ],
)
def test_impossible_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MoEConfig(8, 3, 4, 0, False, "sigmoid"), **change)
