"""Steps beyond the longest that prompts share: one prompt from its start, behind whom it came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jhybrid.engine import buckets, model_runner
from jhybrid.engine.engine import Engine
from jhybrid.engine.warm_up import warm_up_calls

from . import tiny
from .tiny import CONTEXT, assert_greedy, assert_idle, random_prompt, request, run, tiny_engine

SHARED = 64  # tokens that prompts may share a step for


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As on a device where attention has a form for whole prompts, which is the other one here."""
    make = tiny.make_buckets
    monkeypatch.setattr(buckets, "LONG_STEP", SHARED)
    monkeypatch.setattr(tiny, "make_buckets", lambda *args: make(*args, longest_alone=CONTEXT))
    monkeypatch.setattr(
        model_runner, "whole_prompt_pays", lambda config, tokens, room, dtype: SHARED <= tokens
    )
    return tiny_engine(max_prefill_tokens=CONTEXT, own_programs=True)


def steps_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int, int]]]:
    """The pieces (name, start, end) of every step from now on that has some."""
    plans = list[list[tuple[str, int, int]]]()
    schedule = engine.scheduler.schedule

    def planned(**options: Any) -> Any:
        plan = schedule(**options)
        if plan.pieces:
            plans.append([(p.sequence.request.request_id, p.start, p.end) for p in plan.pieces])
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", planned)
    return plans


def test_a_long_prompt_goes_alone_and_keeps_its_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares no step at its start; its rest does, with those that came after it."""
    assert engine.runner.buckets.long_tokens == (128, 256, 512)
    rng, plans = np.random.default_rng(0), steps_of(engine, monkeypatch)
    prompts = {name: random_prompt(rng, size) for name, size in (("a", 20), ("b", 400), ("c", 30))}
    monkeypatch.setattr(buckets, "PREFILL_CALL", 0)  # so that padding is what costs
    found = run(engine, [request(name, prompt) for name, prompt in prompts.items()])
    assert plans == [
        [("a", 0, 20)],
        [("b", 0, 256)],
        [("b", 256, 320)],
        [("b", 320, 384)],
        [("b", 384, 400), ("c", 0, 30)],
    ]
    for name, prompt in prompts.items():
        assert_greedy(prompt, found[name].token_ids)
    assert_idle(engine)


def test_who_comes_later_does_not_keep_a_long_prompt_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, plans = np.random.default_rng(1), steps_of(engine, monkeypatch)
    engine.add(request("before", random_prompt(rng, 50)))
    engine.add(request("long", random_prompt(rng, 300)))
    for n in range(12):
        engine.add(request(f"n{n}", random_prompt(rng, 50), max_tokens=2))
        engine.step()
    while engine.has_work():
        engine.step()
    assert plans[:2] == [[("before", 0, 50)], [("long", 0, 300)]]
    assert_idle(engine)


def test_no_program_is_missing_after_a_start(engine: Engine) -> None:
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, int(size)) for size in rng.integers(1, 480, 24)]
    found = run(engine, [request(f"r{n}", prompt) for n, prompt in enumerate(prompts)])
    for n, prompt in enumerate(prompts):
        assert_greedy(prompt, found[f"r{n}"].token_ids)
    ran = engine.runner.programs.executables.keys()
    assert ran <= {(name, size) for name, size, _ in warm_up_calls(engine.runner)}
    longest = {size for name, size in ran if name == "prefill-lower" and size[0] > SHARED}
    assert longest and all(size[1:] == (2, 1) for size in longest)


def test_prompts_that_wait_for_a_step_of_their_own_find_what_ran_before(engine: Engine) -> None:
    """Admitted no sooner than they can run, all but the first are hits of what they share."""
    rng = np.random.default_rng(3)
    shared = random_prompt(rng, 120)
    prompts = {f"r{n}": [*shared, *random_prompt(rng, 8)] for n in range(4)}
    found = run(engine, [request(name, prompt) for name, prompt in prompts.items()])
    matched = [found[name].usage.matched_tokens for name in prompts]
    assert matched[0] == 0 and all(n == 120 for n in matched[1:])
    for name, prompt in prompts.items():
        assert_greedy(prompt, found[name].token_ids)
