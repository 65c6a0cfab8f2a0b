"""What every case of an op has in the suite `kernels`: inputs, a check, loops to time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from .device_time import Loop
from .kernel_cases import relative_rms
from .variant import Variant


class OpCase(ABC):
    """One op at one size. `sets` are inputs to rotate over; `state` is what a call updates."""

    bound: ClassVar[float] = 5e-3  # relative RMS
    operations: int = 0

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def floor_bytes(self) -> int:
        """Every input that counts read once, every result written once."""

    @abstractmethod
    def sets(self) -> list[Any]: ...

    @abstractmethod
    def state(self) -> Any: ...

    @abstractmethod
    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """(outputs, state) by `implementation`, or by `tuning` from the kernel itself."""

    @abstractmethod
    def tunings(self) -> list[Any]:
        """Worth timing, the default first."""

    def floor_seconds(self, copy_rate: float, matrix_rate: float) -> float:
        return max(self.floor_bytes / copy_rate, self.operations / matrix_rate)

    def expected(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        return self.step(state, inputs, implementation="xla")

    def compared(self, results: Any) -> Any:
        return results

    def check(self, interpret: bool) -> float:
        """The largest relative RMS over the results, against the XLA form."""
        inputs, state = self.sets()[0], self.state()
        options = {"implementation": "pallas", "interpret": interpret}
        found = self.compared(jax.jit(lambda c, x: self.step(c, x, **options))(state, inputs))
        expected = self.compared(jax.jit(self.expected)(state, inputs))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return max(relative_rms(a, b) for a, b in pairs)

    def loop(self, arm: str, expected: float, interpret: bool) -> Loop | None:
        """None where the arm does not serve the case."""
        if arm not in ("pallas", "xla"):
            return None
        return self._loop(expected, implementation=arm, interpret=interpret and arm == "pallas")

    def _loop(self, expected: float, **options: Any) -> Loop:
        return Loop(lambda c, x: self.step(c, x, **options), self.sets(), self.state(), expected)

    def variants(self, interpret: bool) -> list[Variant]:
        expected = 2 * self.floor_seconds(4e12, 7e14)
        tunings = list(dict.fromkeys(self.tunings()))

        def make(tuning: Any) -> Callable[[], Loop]:
            return lambda: self._loop(expected, tuning=tuning, interpret=interpret)

        return [Variant("op", t, tunings[0], make(t)) for t in tunings[: 2 if interpret else None]]
