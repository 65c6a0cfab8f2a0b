"""Device time of an op: a loop inside one program, so that nothing is launched from Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

REPEAT = 5
SPAN = 0.1  # seconds that are timed at once: some .4 ms of them are a program's way to the device
SETTLE = 0.3  # seconds of work before a span counts: a device that rested is 3 to 7 % off for .2


class Loop:
    """Calls `step(state, inputs) -> (out, state)` in turn on several sets of inputs, many times.

    Several sets, so that caches hold less than in a model they would. The inputs of each call are
    tied to the round and to the state, and the outputs of every set leave the loop: nothing can be
    hoisted out of it, or dropped because nobody reads it. `expected` seconds a call, so that one
    run of the program takes about `span` seconds.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        sets: Sequence[Any],
        state: Any,
        expected: float,
        span: float = 0.04,
    ) -> None:
        self._sets, self._state = list(sets), state
        # A CPU interprets the kernels, for a dry run: once is enough.
        rounds = max(1, min(200, round(span / max(expected, 1e-7) / len(sets))))
        rounds = rounds if jax.default_backend() == "gpu" else 1
        self.calls = rounds * len(sets)

        def program(sets: Any, state: Any) -> Any:
            def round_of(index: Any, carry: Any) -> Any:
                outs, state = [], carry[1]
                for inputs in sets:
                    inputs, state, index = lax.optimization_barrier((inputs, state, index))
                    out, state = step(state, inputs)
                    outs.append(out)
                return outs, state

            shapes = jax.eval_shape(step, state, sets[0])[0]
            blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return lax.fori_loop(0, rounds, round_of, ([blank] * len(sets), state))

        self._lowered = jax.jit(program, donate_argnums=1).lower(self._sets, state)
        self._run: Any = None

    def compile(self) -> None:
        """Apart from lowering, so that many loops compile at once on many cores."""
        self._run = self._lowered.compile()

    def seconds(self) -> float:
        """Of one call: the median over REPEAT spans, once the device has settled."""
        state = jax.tree.map(jnp.copy, self._state)

        def span(runs: int) -> float:
            """The next run is sent while one runs, so that the device does not wait between."""
            nonlocal state
            begin = time.perf_counter()
            for _ in range(runs):
                _, state = self._run(self._sets, state)
            jax.block_until_ready(state)
            return time.perf_counter() - begin

        return median_span(span) / self.calls


def median_span(span: Callable[[int], float]) -> float:
    """Seconds of one run, by REPEAT spans of as many as take SPAN: `span` times so many. First the
    device settles."""
    if jax.default_backend() != "gpu":
        return span(1)  # a dry run
    span(1)
    runs = max(1, round(SPAN / span(1)))
    settled = 0.0
    while settled < SETTLE:
        settled += span(runs)
    return statistics.median(span(runs) for _ in range(REPEAT)) / runs


def copy_rate(size: int = 1 << 31) -> float:
    """Bytes read and written a second by a large copy."""
    x = jnp.zeros(size // 4, jnp.float32)
    loop = Loop(lambda x, _: ((), x + 1), [jnp.zeros(())], x, 2 * size / 4e12)
    loop.compile()
    return 2 * size / loop.seconds()


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of a large bf16 product of random matrices."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    loop = Loop(lambda x, b: ((), x @ b), [b], a, 2 * size**3 / 7e14)
    loop.compile()
    return 2 * size**3 / loop.seconds()
