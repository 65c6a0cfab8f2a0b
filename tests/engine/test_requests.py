"""What a request may ask of the engine, end to end: stops, limits, seeds, log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jhybrid.engine.engine import Engine

from .tiny import assert_greedy, assert_idle, oracle_logits, request, run, tiny_engine

PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 256, 37)]


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    return tiny_engine()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    assert_idle(shared_engine)


def log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    return (
        rows
        - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - (rows.max(-1, keepdims=True))
    )


@pytest.mark.parametrize("wrong", [2.0, "7", None, 2**63, -(2**70), np.float32(1)], ids=repr)
def test_a_prompt_of_what_is_no_token_id_is_refused_by_its_value(
    engine: Engine, wrong: Any
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ids of 64 bits, got {wrong!r}")):
        engine.add(request("wrong", [5, 200, wrong, 3]))
    with pytest.raises(ValueError, match="prompt: expected ids from 0 to 262, got 'token id -2'"):
        engine.add(request("below", [5, 300, -2]))


def greedy(engine: Engine, count: int = 12) -> list[int]:
    return run(engine, [request("greedy", PROMPT, max_tokens=count)])["greedy"].token_ids


def test_seeded_text_is_the_same_alone_and_in_a_crowd(engine: Engine) -> None:
    def asked(name: str):
        return request(name, PROMPT, temperature=1.0, seed=5, max_tokens=24, top_p=0.9)

    alone = run(engine, [asked("alone")])["alone"].token_ids
    rng = np.random.default_rng(1)
    crowd = [
        request(f"c{n}", rng.integers(0, 256, 20 + n).tolist(), temperature=1.0, max_tokens=15)
        for n in range(6)
    ]
    together = run(engine, [*crowd[:3], asked("together"), *crowd[3:]])["together"].token_ids
    assert alone == together
    other = request("other", PROMPT, temperature=1.0, seed=6, max_tokens=24, top_p=0.9)
    assert run(engine, [other])["other"].token_ids != alone


def test_stop_token_ends_and_is_not_text(engine: Engine) -> None:
    tokens = greedy(engine)
    stop = tokens[5]
    at = tokens.index(stop)
    result = run(engine, [request("stop", PROMPT, max_tokens=12, stop_token_ids=[stop])])["stop"]
    assert result.token_ids == tokens[: at + 1]
    assert (result.last.finish_reason, result.last.stop_reason) == ("stop", stop)
    late = request("late", PROMPT, max_tokens=12, stop_token_ids=[stop], min_tokens=at + 3)
    assert len(run(engine, [late])["late"].token_ids) >= at + 3


def test_stopping_by_surprise_leaves_a_usable_checkpoint(engine: Engine) -> None:
    """The host learns of the stop one step late; the state it leaves says how far it went."""
    tokens = greedy(engine)
    stop = tokens[5]
    at = tokens.index(stop)
    run(engine, [request("stop", PROMPT, max_tokens=50, stop_token_ids=[stop])])
    longer = PROMPT + tokens[: at + 1] + [9, 9, 9]
    result = run(engine, [request("longer", longer)])["longer"]
    assert result.usage.restored_tokens >= len(PROMPT) + at
    assert_greedy(longer, result.token_ids)


def test_eos_ends_unless_ignored() -> None:
    engine = tiny_engine()
    tokens = greedy(engine)
    ending = tiny_engine(eos=frozenset({tokens[3]}))
    at = tokens.index(tokens[3])
    result = run(ending, [request("eos", PROMPT, max_tokens=12, ignore_eos=False)])["eos"]
    assert result.token_ids == tokens[: at + 1]
    assert (result.last.finish_reason, result.last.stop_reason) == ("stop", None)
    ignored = run(ending, [request("on", PROMPT, max_tokens=12)])["on"]
    assert ignored.token_ids == tokens


def test_max_tokens_null_runs_to_the_end_of_the_context(engine: Engine) -> None:
    prompt = (PROMPT * 14)[:500]
    result = run(engine, [request("end", prompt, max_tokens=None)])["end"]
    assert len(result.token_ids) == engine.max_context - 500
    assert result.last.finish_reason == "length"
    assert_greedy(prompt, result.token_ids)


def test_logprobs_equal_the_oracle(engine: Engine) -> None:
    result = run(engine, [request("lp", PROMPT, max_tokens=10, logprobs=4)])["lp"]
    rows = log_softmax(oracle_logits(PROMPT + result.token_ids))[len(PROMPT) - 1 : -1]
    found = [item for update in result.updates for item in update.logprobs]
    assert len(found) == 10
    for item, row, token in zip(found, rows, result.token_ids, strict=True):
        assert item.token_id == token
        np.testing.assert_allclose(item.logprob, row[token], atol=2e-4)
        best = np.sort(row)[::-1][:4]
        np.testing.assert_allclose([p for _, p in item.top], best, atol=2e-4)


@pytest.mark.parametrize("most", [64, 100])
def test_prompt_logprobs_equal_the_oracle_warm_or_cold(most: int) -> None:
    """Asked twice, of a prompt longer than a step and already cached: the values stay."""
    engine, prompt = tiny_engine(max_prefill_tokens=most), PROMPT * 3
    rows = log_softmax(oracle_logits(prompt))
    for name in ("first", "second"):
        result = run(engine, [request(name, prompt, prompt_logprobs=2, max_tokens=2)])[name]
        found = result.updates[0].prompt_logprobs
        assert found is not None and found[0] is None and len(found) == len(prompt)
        for n, item in enumerate(found[1:], start=1):
            assert item is not None and item.token_id == prompt[n]
            np.testing.assert_allclose(item.logprob, rows[n - 1, prompt[n]], atol=2e-4)
            assert len(item.top) == 2
    assert_idle(engine)


def test_logit_bias_forces_and_forbids(engine: Engine) -> None:
    forced = request("forced", PROMPT, max_tokens=5, logit_bias={65: 100.0})
    assert run(engine, [forced])["forced"].token_ids == [65] * 5
    best = greedy(engine, 1)[0]
    forbidden = request("forbidden", PROMPT, max_tokens=1, logit_bias={best: -100.0})
    assert run(engine, [forbidden])["forbidden"].token_ids != [best]


def test_penalties_survive_preemption() -> None:
    """Counts are rebuilt when a request comes back: the text is that of an unpressured run."""
    rng = np.random.default_rng(3)
    prompts = {f"p{n}": rng.integers(0, 256, 60 + n).tolist() for n in range(5)}
    asked = [
        request(name, p, max_tokens=70, frequency_penalty=1.0, repetition_penalty=1.3)
        for name, p in prompts.items()
    ]
    calm, pressed = tiny_engine(), tiny_engine(pages=64)
    expected = run(calm, asked)
    found = run(pressed, asked)
    assert pressed.metrics().preemptions > 0 and calm.metrics().preemptions == 0
    for name in prompts:
        assert found[name].token_ids == expected[name].token_ids


def test_text_is_the_bytes_of_the_tokens(engine: Engine) -> None:
    bias = {t: 100.0 for t in (0xE2, 0x82, 0xAC)}  # the three bytes of one character
    result = run(engine, [request("utf8", PROMPT, max_tokens=6, logit_bias=bias)])["utf8"]
    assert result.text == bytes(result.token_ids).decode("utf-8", errors="replace")
