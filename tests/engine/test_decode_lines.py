"""Lines of decode steps: the device has what a step needs, and a steady decode sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.engine.decode_lines import (
    DecodeLines,
    Drawn,
    LinesOnDevice,
    add_pages,
    decode_batch,
    empty_lines,
    set_lines,
)
from jhybrid.engine.engine import Engine

from .tiny import assert_greedy, assert_idle, random_prompt, request, run, tiny_engine

SIZE, WIDEST = 4, 9


def wanted_lines(rng: np.random.Generator, inputs: bool) -> Iterator[DecodeLines]:
    """What batches ask for that get pages, exchange some, lose theirs and change their members."""
    lines: Any = empty_lines(SIZE, 2, group_inputs=inputs)
    for _ in range(60):
        table, what = lines.page_table, rng.integers(6)
        if what == 0 and table.shape[1] < WIDEST:
            table = np.pad(table, ((0, 0), (0, 1)), constant_values=-1)
            table[rng.integers(SIZE), -1] = rng.integers(100)
        elif what == 1 and table.shape[1] > 1:
            table = table[:, :-1]
        elif what == 2:
            table = rng.integers(0, 100, table.shape, np.int32)
        elif what == 3:
            name = ("rows", "starts", "state_slots")[rng.integers(3)]
            lines = replace(lines, **{name: rng.integers(-1, 50, SIZE, np.int32)})
        elif what == 4 and inputs:
            lines = replace(lines, input_pages=rng.integers(-1, 50, SIZE, np.int32))
        lines = replace(lines, page_table=table.copy())
        yield lines


@pytest.mark.parametrize("inputs", [False, True])
def test_the_device_has_what_is_wanted_and_is_told_of_changes_only(inputs: bool) -> None:
    calls = list[str]()

    programs = {
        function.__name__: jax.jit(function, donate_argnums=0, keep_unused=True)
        for function in (set_lines, add_pages)
    }

    def call(name: str, *args: Any) -> Any:
        calls.append(name)
        return programs[name](*args)

    kept = LinesOnDevice(empty_lines(SIZE, WIDEST, group_inputs=inputs), call)
    before: Any = replace(empty_lines(SIZE, WIDEST, group_inputs=inputs), rows=np.full(SIZE, -2))
    wanted: Any
    for wanted in wanted_lines(np.random.default_rng(inputs), inputs):
        calls.clear()
        found = jax.tree.map(np.array, kept.bring(wanted))  # not the buffer, which is donated
        assert found.page_table.shape == (SIZE, WIDEST)
        width = wanted.page_table.shape[1]
        cut = replace(found, page_table=found.page_table[:, :width])
        jax.tree.map(np.testing.assert_array_equal, cut, wanted)
        names = ("rows", "starts", "state_slots")
        others = any(
            not np.array_equal(getattr(before, name), getattr(wanted, name)) for name in names
        )
        if others or (pages := int(np.sum(before.page_table[:, :width] != cut.page_table))) > SIZE:
            assert calls == ["set_lines"]
        else:
            changed = pages or inputs and not np.array_equal(before.input_pages, cut.input_pages)
            assert calls == ["add_pages"] * bool(changed)
        before = found


def test_a_batch_follows_from_lines_and_what_was_drawn() -> None:
    lines = DecodeLines(
        rows=jnp.array([2, -1, 0]),
        starts=jnp.array([6, -1, 3]),
        page_table=jnp.array([[5, 7, 9], [-1, -1, -1], [4, 8, -1]]),
        state_slots=jnp.array([1, -1, 3]),
        input_pages=jnp.array([3, -1, -1]),
    )
    batch = decode_batch(lines, Drawn(jnp.array([11, 12, 13]), jnp.array([1, 50, 3])), 4)
    assert batch.positions.tolist() == [9, -1, 4]
    assert batch.kv_slots.tolist() == [9 * 4 + 1, -1, 8 * 4]
    assert batch.input_slots is not None
    assert batch.input_slots.tolist() == [3 * 4 + 1, -1, -1]
    assert (int(batch.token_ids[0]), int(batch.token_ids[2])) == (13, 11)
    assert batch.state_slots is lines.state_slots and batch.page_table is lines.page_table


class Seen:
    """Calls of an engine's programs: the names, and where arguments and results of decodes are."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = list[str]()
        self.places = list[tuple[int, ...]]()
        inner = engine.runner.programs.call

        def call(name: str, size: Any, *args: Any) -> Any:
            self.names.append(name)
            before = places(args) if name == "decode" else ()
            out = inner(name, size, *args)
            if name == "decode":
                self.places.append((*before, *places(out)))
            return out

        monkeypatch.setattr(engine.runner.programs, "call", call)


def places(tree: Any) -> tuple[int, ...]:
    return tuple(x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree))


def decoding(engine: Engine, prompts: list[list[int]], **params: Any) -> dict[str, list[int]]:
    """Steps until every prompt decodes and its lines are on the device; tokens so far."""
    tokens = {f"p{n}": list[int]() for n in range(len(prompts))}
    for n, prompt in enumerate(prompts):
        engine.add(request(f"p{n}", prompt, **params))
    while not all(tokens.values()):
        step(engine, tokens)
    return tokens


def step(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for update in engine.step():
        tokens[update.request_id].extend(update.token_ids)


@pytest.mark.parametrize("flags", [{}, {"recovery": "tail-replay"}], ids=["dense", "inputs"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_steady_decode_sends_nothing_and_stays_where_it_is(
    flags: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(page_size=64, **flags)
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, length) for length in (5, 20, 9)]
    tokens = decoding(engine, prompts, max_tokens=40, temperature=temperature, seed=1)
    seen = Seen(engine, monkeypatch)
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        for _ in range(30):
            step(engine, tokens)
    mode = "draw-RANDOM" if temperature else "draw-GREEDY"
    assert seen.names == ["decode", mode] * 30
    assert len(set(seen.places)) == 1
    while engine.has_work():
        step(engine, tokens)
    assert all(len(found) == 40 for found in tokens.values())
    if not temperature:
        for prompt, found in zip(prompts, tokens.values(), strict=True):
            assert_greedy(prompt, found)
    assert_idle(engine)


def test_pages_alone_are_sent_and_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a step in which some of three sequences get a page, in none of the others."""
    engine = tiny_engine(page_size=8, max_running=3)
    prompts = [[1] * 9, [2] * 11, [3] * 11]
    tokens = decoding(engine, prompts, max_tokens=60)
    seen = Seen(engine, monkeypatch)
    grown = 0
    for _ in range(40):
        at = {s.dispatched % 8 for s in engine.scheduler.running}
        grown += 0 in at
        seen.names.clear()
        step(engine, tokens)
        assert seen.names == ["add_pages"] * (0 in at) + ["decode", "draw-GREEDY"]
    assert 0 < grown < 40
    assert len(set(seen.places)) == 1
    while engine.has_work():
        step(engine, tokens)
    for prompt, found in zip(prompts, tokens.values(), strict=True):
        assert_greedy(prompt, found)


def test_members_change_and_come_back() -> None:
    """Requests of one prompt that end and begin at other steps, in the lines of those before."""
    engine = tiny_engine(max_running=3)
    rng = np.random.default_rng(4)
    trunk = random_prompt(rng, 40)
    prompts = {f"r{n}": trunk[: 3 + 4 * n] for n in range(9)}
    requests = [request(name, p, max_tokens=5 + 7 * (len(p) % 3)) for name, p in prompts.items()]
    for _ in range(2):
        found = run(engine, requests)
        for name, prompt in prompts.items():
            assert_greedy(prompt, found[name].token_ids)
    assert_idle(engine)
