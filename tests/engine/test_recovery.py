"""What a hit on a compressed checkpoint restores, through the engine, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jhybrid.engine.request import PrefixCacheOptions
from tests.assertions import assert_close
from tests.engine.recovery_bench import (
    MODELS,
    PROMPT,
    SUFFIX,
    W_MAX,
    dense_state,
    dense_tokens,
    engine_for,
    hit,
    plan_of,
    prime,
    stored,
)

from .tiny import assert_greedy, assert_idle, request, run, tiny_engine


@pytest.mark.parametrize("kind", MODELS)
def test_a_full_plan_is_the_dense_state(kind: str) -> None:
    engine, dense = engine_for(kind, "full"), dense_state(kind)
    for recovery in ("dasc-nr", "dasc-wr", "anchored", "dense"):  # nothing to refresh
        prime(engine)
        found = hit(engine, recovery)
        np.testing.assert_array_equal(found.state.recurrent, dense.recurrent)
        np.testing.assert_array_equal(found.state.conv, dense.conv)
        assert found.token_ids == dense_tokens(kind)
        usage = found.usage
        assert (usage.restored_tokens, usage.replayed_tokens) == (len(PROMPT), 0)
        assert (usage.recovery, usage.reason) == (recovery, None)


@pytest.mark.parametrize("kind", MODELS)
def test_an_empty_plan_restores_windows_only(kind: str) -> None:
    engine = engine_for(kind, "empty")
    prime(engine)
    found = hit(engine, "dasc-nr")
    np.testing.assert_array_equal(found.state.recurrent, 0)
    np.testing.assert_array_equal(found.state.conv, dense_state(kind).conv)
    assert found.usage.recovery == "dasc-nr"


@pytest.mark.parametrize("recovery", ["dasc-nr", "dasc-wr", "anchored"])
@pytest.mark.parametrize("kind", MODELS)
def test_kept_units_and_windows_are_exact_and_what_is_stored_stays(
    kind: str, recovery: str
) -> None:
    engine, plan, dense = engine_for(kind, "some"), plan_of(kind, "some"), dense_state(kind)
    prime(engine)
    before = stored(engine)
    found = hit(engine, recovery)
    kept, state = plan.row_mask, found.state.recurrent
    np.testing.assert_array_equal(state[kept], dense.recurrent[kept])
    np.testing.assert_array_equal(found.state.conv, dense.conv)
    for old, new in zip(before, stored(engine), strict=True):
        np.testing.assert_array_equal(old, new)
    if recovery == "dasc-nr":
        np.testing.assert_array_equal(state[~kept], 0)
        assert found.usage.replayed_tokens == 0
    else:
        assert found.usage.replayed_tokens == plan.replay_window > 0
        error = np.abs(state[~kept] - dense.recurrent[~kept]).mean()
        assert 0 < error < np.abs(dense.recurrent[~kept]).mean()  # nearer than zeros are
    usage = found.usage
    assert (usage.recovery, usage.matched_tokens) == (recovery, len(PROMPT))
    assert usage.restored_tokens == usage.cached_tokens == len(PROMPT)


@pytest.mark.parametrize("recovery", ["dasc-wr", "anchored"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_refresh_of_the_whole_prefix_is_a_cold_prefill(kind: str, recovery: str) -> None:
    engine = engine_for(kind, "some")
    prime(engine)
    window = engine.scheduler.replay_window
    engine.scheduler.replay_window = 4 * len(PROMPT)
    try:
        found = hit(engine, recovery)
    finally:
        engine.scheduler.replay_window = window
    assert found.usage.replayed_tokens == len(PROMPT)  # capped by the prefix
    assert_close("state", found.state.recurrent, dense_state(kind).recurrent, 1e-5)
    assert found.token_ids == dense_tokens(kind)


@pytest.mark.parametrize("kind", MODELS)
def test_int8_keeps_units_within_half_a_step(kind: str) -> None:
    engine = engine_for(kind, "some", checkpoint_dtype="int8")
    plan, dense = plan_of(kind, "some"), dense_state(kind)
    prime(engine)
    found = hit(engine, "dasc-nr")
    kept = plan.row_mask
    rows, exact = found.state.recurrent[kept], dense.recurrent[kept]
    step = np.abs(exact).max(axis=-1, keepdims=True) / 127
    assert (np.abs(rows - exact) <= 0.5001 * step + 1e-30).all()
    assert (rows != exact).any()
    np.testing.assert_array_equal(found.state.recurrent[~kept], 0)


def test_requests_choose_and_a_strict_one_never_meets_an_approximation() -> None:
    """The text of `dense` and `off` is a cold server's, whatever approximate ones left behind."""
    engine = engine_for("gdn", "some")
    prime(engine)
    longer = PROMPT + SUFFIX
    approximate = hit(engine, "dasc-nr")
    again = longer + approximate.token_ids + [7, 8, 9]
    for recovery in ("dasc-nr", "dasc-wr"):
        asked = PrefixCacheOptions(recovery)  # type: ignore[arg-type]
        result = run(engine, [request("more", again, prefix_cache=asked)])["more"]
        assert result.usage.restored_tokens >= len(longer)  # what they leave is theirs to reuse
    for name in ("dense", "off"):
        asked = PrefixCacheOptions(name)  # type: ignore[arg-type]
        result = run(engine, [request("exact", again, max_tokens=12, prefix_cache=asked)])["exact"]
        assert_greedy(again, result.token_ids)
        if name == "dense":
            assert result.usage.matched_tokens == len(PROMPT)
            assert (result.usage.restored_tokens, result.usage.reason) == (0, "not_exact")
    scored = run(engine, [request("scored", again, max_tokens=12, prompt_logprobs=0)])["scored"]
    assert_greedy(again, scored.token_ids)
    with pytest.raises(
        ValueError, match="^prefix_cache.recovery: .* dense, zero, off, got 'dasc-nr'"
    ):
        plain = engine_for("gdn", "dense")
        plain.add(request("no", PROMPT, prefix_cache=PrefixCacheOptions("dasc-nr")))


def test_a_refresh_longer_than_a_step_runs_in_pieces_beside_others() -> None:
    """Replayed tokens share the budget of a step with prompts, and wait for what is left."""
    engine = engine_for("gdn", "some", max_prefill_tokens=16)
    engine.scheduler.replay_window = 40
    prime(engine)
    other = [int(t) for t in np.random.default_rng(3).integers(0, 256, 40)]
    wanted = PrefixCacheOptions("dasc-wr")
    results = run(
        engine,
        [
            request("other", other, max_tokens=20),
            request("hit", PROMPT + SUFFIX, prefix_cache=wanted),
        ],
    )
    assert_greedy(other, results["other"].token_ids)
    assert results["hit"].usage.replayed_tokens == 40
    prime(engine)
    alone = hit(engine, "dasc-wr")
    assert alone.token_ids == results["hit"].token_ids
    kept = plan_of("gdn", "some").row_mask
    exact = dense_state("gdn").recurrent  # of another cut into pieces
    assert_close("kept units", alone.state.recurrent[kept], exact[kept], 1e-4)


@pytest.mark.parametrize("placement", ["off", "storage", "hybrid"])
def test_tensor_parallel_gives_the_same_tokens(placement: str) -> None:
    plan = plan_of("gdn", "some")
    expected = {}
    for tp in (1, 4):
        engine = tiny_engine(
            tp=tp,
            plan=plan,
            recovery="dasc-wr",
            w_max=W_MAX["gdn"],
            placement=placement if tp > 1 else "off",
            slots=4,
            compressed_slots=6,
            watermark=1,
            max_running=2,
        )
        run(engine, [request("prime", PROMPT, max_tokens=1)])
        for recovery in ("dasc-nr", "dasc-wr"):
            asked = PrefixCacheOptions(recovery)  # type: ignore[arg-type]
            prompt = [*PROMPT, ord(recovery[-2]), *SUFFIX]
            result = run(engine, [request(recovery, prompt, prefix_cache=asked)])[recovery]
            assert result.usage.recovery == recovery
            assert result.usage.restored_tokens == len(PROMPT)
            assert expected.setdefault(recovery, result.token_ids) == result.token_ids
        assert_idle(engine)


def test_pressure_demotes_evicts_and_loses_nothing() -> None:
    """Two native slots beside the running ones, a full plan: every text is the uncached model's."""
    engine = tiny_engine(
        plan=plan_of("gdn", "full"),
        recovery="dasc-nr",
        w_max=W_MAX["gdn"],
        pages=80,
        slots=5,
        compressed_slots=6,
        watermark=2,
        max_running=3,
    )
    rng = np.random.default_rng(9)
    shared = [int(t) for t in rng.integers(0, 256, 40)]
    restored = 0
    for turn in range(4):
        prompts = {}
        for n in range(8):
            tail = [int(t) for t in np.random.default_rng(n).integers(0, 256, 10 + 9 * turn)]
            prompts[f"t{turn}-{n}"] = shared[: 5 * n] + tail
        results = run(engine, [request(k, p, max_tokens=12) for k, p in prompts.items()])
        for name, prompt in prompts.items():
            assert_greedy(prompt, results[name].token_ids)
            restored += results[name].usage.restored_tokens
    m = engine.metrics()
    assert restored > 0 and m.demotions["committed"] > 20 and m.demotions["aborted"] == 0
    assert m.evictions["compressed_slots"] > 0
    assert m.pools["compressed_slots"]["tree"] == 6
    assert_idle(engine)


def test_a_pack_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("gdn", "some")
    assert engine.flush_cache()

    def broken(moves: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.runner, "store_states", broken)
    engine.add(request("first", PROMPT, max_tokens=1))
    with pytest.raises(RuntimeError, match="injected"):
        while engine.has_work():
            engine.step()
    monkeypatch.undo()
    engine.cache.check_integrity()
    assert engine.cache.stats().demotions["aborted"] > 0
    while engine.has_work():
        engine.step()
    assert_idle(engine)
    exact = run(engine, [request("second", PROMPT, prefix_cache=PrefixCacheOptions("dense"))])
    assert exact["second"].usage.recovery == "dense"
    assert exact["second"].usage.restored_tokens > 0
    assert_greedy(PROMPT, exact["second"].token_ids)


def test_the_pools_and_the_recoveries_are_told() -> None:
    engine = engine_for("gdn", "some")
    prime(engine)
    before = dict(engine.metrics().prefix_hits)
    hit(engine, "dasc-wr")
    told = engine.metrics().prefix_hits
    assert told["dasc-wr"] == before["dasc-wr"] + 1 and told["dense"] == before["dense"]
    pools = engine.info()["pools"]
    pool = engine.runner.compressed
    assert pool is not None
    told = pools["compressed_slots"]
    assert told["total"] == 12 and told["running"] == 0 and told["tree"] > 0
    assert told["bytes"] == pool.states.values.nbytes + pool.conv.nbytes
    text = engine.metrics().prometheus_text().decode()
    assert 'jhybrid:pool{owner="tree",pool="compressed_slots"}' in text
    assert 'jhybrid:demotions_total{outcome="committed"}' in text
