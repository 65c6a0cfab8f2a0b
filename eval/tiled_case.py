"""Cases of the suite `kernels`: gate and up of a prefill, many rows at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jhybrid.layers.mlp import activation_of
from pallas_kernels import tiled_matmul
from pallas_kernels.tiled_matmul import kernel
from pallas_kernels.tiled_matmul.tuning import TiledTuning

from .op_case import OpCase
from .variant import Variant


@dataclass(frozen=True)
class TiledCase(OpCase):
    """Gate and up of a model, of which so many rows of a bucket are no padding."""

    model: str
    inner: int
    width: int
    rows: int
    count: int

    @property
    def name(self) -> str:
        return f"gate_up/{self.model}/{self.count}of{self.rows}"

    @property
    def operations(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 4 * self.count * self.inner * self.width

    @property
    def floor_bytes(self) -> int:
        return 2 * (self.count * (self.inner + self.width) + 2 * self.width * self.inner)

    def sets(self) -> list[Any]:
        x, w = jax.random.key(0), jax.random.key(1)
        weights = jax.random.normal(w, (2, self.width, self.inner), jnp.bfloat16)
        rows = jax.random.normal(x, (self.rows, self.inner), jnp.bfloat16)
        return [(rows, weights * jnp.bfloat16(self.inner**-0.5))]

    def state(self) -> Any:
        return ()

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        x, weights = inputs
        count = jnp.int32(self.count)
        op: Any = kernel.tiled_matmul if "tuning" in options else tiled_matmul
        return op(x, weights, activation_of("silu"), count, **options), state

    def compared(self, results: Any) -> Any:
        """Rows of padding may be zeros or not."""
        return results[0][: self.count]

    def tunings(self) -> list[Any]:
        shapes = (self.rows, self.inner), (2, self.width, self.inner)
        avals: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        default = TiledTuning.default(*avals, interpret=False)
        assert default is not None
        return [default, replace(default, stripe=16), replace(default, pair=False)]

    def variants(self, interpret: bool) -> list[Variant]:
        """None interpreted: the interpreter knows no blocks that share a load."""
        return [] if interpret else super().variants(interpret)


def tiled_cases() -> list[TiledCase]:
    """Of Qwen3.5-4B and Qwen3.6-27B."""
    sizes = ((8192, 8192), (32768, 31847))
    models = (("4b", 2560, 9216), ("27b", 5120, 17408))
    return [TiledCase(*model, *size) for model in models for size in sizes]


def tiny_tiled_cases() -> list[TiledCase]:
    return [TiledCase("tiny", 320, 128, 256, 150)]
