"""What Python does for a program: once for all layers of a kind, not once a layer."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

from jhybrid.config import LayerConfig
from jhybrid.engine.warm_up import warm_up, warm_up_calls
from tests.engine.tiny import TINY, tiny_engine

DEEP = replace(TINY, layers=tuple(LayerConfig(kind) for kind in ("linear", "linear", "full")) * 4)


def _lowered(name: str, **flags: Any) -> tuple[Counter[str], Counter[str]]:
    """How often each function of a program of twelve layers is written out, and is called."""
    runner = tiny_engine(DEEP, max_running=2, **flags).runner
    args = next(args for call, _, args in warm_up_calls(runner) if call == name)
    text = runner.programs.functions[name].lower(*args).as_text()
    kinds = r"(decoder_layer|_rule_inputs|_rest_of_layer)(?:_\d+)?\("
    written = Counter(re.findall(r"func\.func private @" + kinds, text))
    return written, Counter(re.findall(r" call @" + kinds, text))


@pytest.mark.parametrize(
    ("name", "kinds", "layers"),
    [("prefill-lower", 2, 11), ("prefill-upper", 1, 1), ("decode", 2, 12)],
)
def test_layers_of_a_kind_are_lowered_once(name: str, kinds: int, layers: int) -> None:
    assert _lowered(name) == ({"decoder_layer": kinds}, {"decoder_layer": layers})


def test_layers_of_a_replay_are_lowered_once() -> None:
    """Two linear layers in each group: of the second, whose output nobody wants, a part. In either
    position the first layer begins the array that the others write on in."""
    written, called = _lowered("replay", recovery="anchored")
    assert written == {"_rule_inputs": 4, "_rest_of_layer": 1}
    assert called == {"_rule_inputs": 8, "_rest_of_layer": 4}


def test_a_program_is_that_of_the_plain_loop() -> None:
    """XLA inlines the calls, so that pools are still updated in place."""
    runner = tiny_engine(DEEP, max_running=2).runner
    args = next(args for call, _, args in warm_up_calls(runner) if call == "decode")
    text = runner.programs.compile("decode", args).as_text()
    calls = re.findall(r"^.* call\(.*decoder_layer.*$", text, re.MULTILINE)
    assert [call for call in calls if "xla_cpu_small_call" not in call] == []  # small: XLA's loops


def test_python_lowers_one_program_at_a_time_the_slowest_first() -> None:
    runner = tiny_engine(max_running=2).runner
    busy, order = 0, list[tuple[Any, ...]]()

    class Lowered:
        def compile(self, compiler_options: Any) -> str:
            return "executable"

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def lower(self, *args: Any) -> Lowered:
            nonlocal busy
            busy += 1
            time.sleep(0.002)
            assert busy == 1
            order.append((self.name, *jax.tree.map(jax.numpy.shape, args)))
            busy -= 1
            return Lowered()

    calls = list(warm_up_calls(runner))
    expected = [(name, *jax.tree.map(jax.numpy.shape, args)) for name, _, args in calls]
    names = {name for name, *_ in calls}
    runner.programs = type(runner.programs)({name: Function(name) for name in names}, "cpu")
    assert len(list(warm_up(runner))) == len(calls)
    assert order == expected
    assert set(runner.programs.executables) == {(name, size) for name, size, _ in calls}
