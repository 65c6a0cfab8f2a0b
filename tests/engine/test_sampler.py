"""Sampling against numpy: truncation, penalties, bias, seeds, log-probabilities."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.engine.sampler import SampleMode, SamplerRows, init_rows, sample, set_row, set_seen

VOCAB, VALID, ROWS = 24, 20, 4


@functools.cache
def sampler(mode: SampleMode) -> Any:
    return jax.jit(functools.partial(sample, mode=mode, valid_vocab=VALID))


def rows_with(row: int = 0, **fields: Any) -> SamplerRows:
    """Fresh rows with some parameters of one row set."""
    state = init_rows(ROWS, VOCAB)
    params = state.params
    for name, value in fields.items():
        old = getattr(params, name)
        params = replace(params, **{name: old.at[row].set(jnp.asarray(value, old.dtype))})
    return replace(state, params=params)


def logits_of(seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 2, (1, VOCAB)).astype(np.float32)
    logits[0, VALID:] = 50  # padding of the embedding: tempting, and never drawn
    return logits


def support(logits: np.ndarray, draws: int = 400, **fields: Any) -> np.ndarray:
    """Counts of each token over many draws of one row."""
    state = rows_with(temperature=1.0, **fields)
    counts = np.zeros(VOCAB)
    step = sampler(SampleMode.RANDOM)
    for _ in range(draws):
        state, out = step(state, logits, jnp.zeros(1, jnp.int32))
        counts[int(out.tokens[0])] += 1
    return counts


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_greedy_takes_the_best_real_token() -> None:
    logits = logits_of()
    for mode in SampleMode:
        _, out = sampler(mode)(rows_with(), logits, jnp.zeros(1, jnp.int32))
        assert int(out.tokens[0]) == logits[0, :VALID].argmax()


def test_draws_follow_the_distribution() -> None:
    logits = logits_of()
    counts = support(logits, draws=3000)
    probs = np.append(softmax(logits[0, :VALID]), np.zeros(VOCAB - VALID))
    assert counts[VALID:].sum() == 0
    # 3,000 draws: four standard deviations of every count
    assert (np.abs(counts - 3000 * probs) <= 4 * np.sqrt(3000 * probs * (1 - probs)) + 1).all()


@pytest.mark.parametrize(
    ("fields", "keep"),
    [
        ({"top_k": 3}, lambda p: np.argsort(-p)[:3]),
        ({"top_k": 1}, lambda p: np.argsort(-p)[:1]),
        ({"top_p": 0.6}, lambda p: _nucleus(p, 0.6)),
        ({"top_p": 1e-6}, lambda p: np.argsort(-p)[:1]),
        ({"min_p": 0.3}, lambda p: np.flatnonzero(p >= 0.3 * p.max())),
        ({"top_k": 4, "top_p": 0.7}, lambda p: _nucleus(_top(p, 4), 0.7)),
    ],
)
def test_truncation_keeps_exactly(fields: dict[str, Any], keep: Any) -> None:
    logits = logits_of(1)
    expected = set(keep(softmax(logits[0, :VALID])).tolist())
    found = set(np.flatnonzero(support(logits, **fields)).tolist())
    assert found <= expected
    likely = softmax(logits[0, :VALID])
    assert {t for t in expected if likely[t] > 0.05} <= found


def _top(p: np.ndarray, k: int) -> np.ndarray:
    kept = np.where(p >= np.sort(p)[-k], p, 0)
    return kept / kept.sum()


def _nucleus(p: np.ndarray, mass: float) -> np.ndarray:
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    return order[before < mass]


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    """The same row gives the same tokens in another row, another batch, another place."""
    logits = np.random.default_rng(3).normal(0, 1, (3, VOCAB)).astype(np.float32)
    step = sampler(SampleMode.RANDOM)
    alone, together = (
        rows_with(1, temperature=1.0, seed=[7, 9]),
        rows_with(3, temperature=1.0, seed=[7, 9]),
    )
    for _ in range(20):
        alone, one = step(alone, logits[:1], jnp.array([1], jnp.int32))
        batch = jnp.array([0, 3, -1], jnp.int32)
        together, three = step(together, logits[[1, 0, 2]], batch)
        assert int(one.tokens[0]) == int(three.tokens[1])
    other = rows_with(1, temperature=1.0, seed=[7, 10])
    tokens = []
    for _ in range(20):
        other, out = step(other, logits[:1], jnp.array([1], jnp.int32))
        tokens.append(int(out.tokens[0]))
    assert len(set(tokens)) > 1


def test_padding_rows_change_nothing() -> None:
    state = rows_with(temperature=1.0)
    after, _ = sampler(SampleMode.FULL)(state, logits_of(), jnp.array([-1], jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, state, after)


def test_penalties_bias_and_bans_follow_their_formulas() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = [4.0, 3.0, -1.0, 2.0]
    bias_token = np.full(300, -1, np.int32)
    bias_token[:2] = [3, 5]
    bias_value = np.zeros(300, np.float32)
    bias_value[:2] = [0.5, -100]
    banned = np.full(32, -1, np.int32)
    banned[0] = 0
    state = rows_with(
        presence=0.3,
        frequency=0.2,
        repetition=2.0,
        bias_token=bias_token,
        bias_value=bias_value,
        banned=banned,
        min_tokens=1,
    )
    in_prompt, counts = np.zeros(VOCAB, bool), np.zeros(VOCAB, np.int32)
    in_prompt[2], counts[1] = True, 2
    state = set_seen(state, jnp.int32(0), jnp.asarray(in_prompt), jnp.asarray(counts))
    expected = np.zeros(VALID)
    expected[1] = 3.0 / 2 - 2 * 0.2 - 0.3  # seen twice
    expected[2] = -1.0 * 2  # in the prompt: repetition only
    expected[3] = 2.5
    expected[5] = -100
    expected[0] = -np.inf  # banned before min_tokens
    state, out = sampler(SampleMode.FULL)(state, logits, jnp.zeros(1, jnp.int32))
    assert int(out.tokens[0]) == 3
    logprobs = expected - np.log(np.exp(expected).sum())
    np.testing.assert_allclose(out.logprob[0], logprobs[3], rtol=1e-5)
    best = np.argsort(-logprobs, kind="stable")[:3]
    np.testing.assert_array_equal(out.top_tokens[0, :2], best[:2])
    np.testing.assert_allclose(out.top_logprobs[0, :3], logprobs[best], rtol=1e-5)
    assert int(state.counts[0, 3]) == 1
    # one token generated: the ban is over, and token 3 is now penalised
    _, out = sampler(SampleMode.FULL)(state, logits, jnp.zeros(1, jnp.int32))
    assert int(out.tokens[0]) == 0


def test_set_row_touches_one_row() -> None:
    state = init_rows(ROWS, VOCAB)
    values = jax.tree.map(lambda x: x[0] + 1, state.params)
    after = set_row(state, jnp.int32(2), values)
    for name in ("last_token", "temperature", "bias_token", "seed"):
        rows = np.asarray(getattr(after.params, name))
        np.testing.assert_array_equal(rows[2], getattr(values, name))
        np.testing.assert_array_equal(rows[[0, 1, 3]], np.asarray(getattr(state.params, name))[1:])
