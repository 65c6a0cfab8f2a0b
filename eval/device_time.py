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


class Loop:
    """Calls `step(carry, inputs) -> carry` in turn on several sets of inputs, many times over.

    Several sets, so that caches hold less than in a model they would. The inputs of each call are
    tied to the result of the one before: nothing can be hoisted out of the loop or merged.
    """

    def __init__(
        self, step: Callable[[Any, Any], Any], sets: Sequence[Any], carry: Any, expected: float
    ) -> None:
        self._sets, self._carry = list(sets), carry
        # A CPU interprets the kernels, for a dry run: once is enough.
        rounds = max(1, min(200, round(0.04 / max(expected, 1e-7) / len(sets))))
        rounds = rounds if jax.default_backend() == "gpu" else 1
        self.calls = rounds * len(sets)

        def program(sets: Any, carry: Any) -> Any:
            def round_of(_: Any, carry: Any) -> Any:
                for inputs in sets:
                    inputs, carry = lax.optimization_barrier((inputs, carry))
                    carry = step(carry, inputs)
                return carry

            return lax.fori_loop(0, rounds, round_of, carry)

        self._lowered = jax.jit(program, donate_argnums=1).lower(self._sets, carry)
        self._run: Any = None

    def compile(self) -> None:
        """Apart from lowering, so that many loops compile at once on many cores."""
        self._run = self._lowered.compile()

    def seconds(self) -> float:
        """Of one call: the median over REPEAT runs of the program, after one to warm up."""
        carry = jax.tree.map(jnp.copy, self._carry)
        spans = []
        for _ in range(1 + REPEAT):
            begin = time.perf_counter()
            carry = jax.block_until_ready(self._run(self._sets, carry))
            spans.append(time.perf_counter() - begin)
        return statistics.median(spans[1:]) / self.calls


def copy_rate(size: int = 1 << 31) -> float:
    """Bytes read and written a second by a large copy."""
    x = jnp.zeros(size // 4, jnp.float32)
    loop = Loop(lambda carry, _: carry + 1, [jnp.zeros(())], x, 2 * size / 4e12)
    loop.compile()
    return 2 * size / loop.seconds()


def matmul_rate(size: int = 8192) -> float:
    """Operations a second of a large bfloat16 product, on random values."""
    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))
    loop = Loop(lambda _, x: x[0] @ x[1], [(a, b)], jnp.zeros_like(a), 2 * size**3 / 7e14)
    loop.compile()
    return 2 * size**3 / loop.seconds()
