"""Cases of the suite `kernels`: the products of an expert layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.layers.mlp import activation_of
from jhybrid.layers.moe import ByExpert, sort_by_expert
from pallas_kernels import grouped_matmul, preferred_alignment
from pallas_kernels.grouped_matmul import kernel as matmul_kernel
from pallas_kernels.grouped_matmul.tuning import MatmulTuning

from .op_case import OpCase

Product = Literal["gate_up", "down"]


@dataclass(frozen=True)
class ExpertsCase(OpCase):
    """One of the two products of an expert layer; the default is Qwen3.5-35B-A3B's."""

    product: Product
    tokens: int
    hidden: int = 2048
    inner: int = 512
    experts: int = 256
    chosen: int = 8

    @property
    def name(self) -> str:
        sizes = f"{self.chosen}of{self.experts}x{self.inner}x{self.hidden}"
        return f"experts_{self.product}/{sizes}/{self.tokens}"

    @property
    def _widths(self) -> tuple[int, int, int]:
        """(inputs, rows of a matrix, results)"""
        if self.product == "gate_up":
            return self.hidden, 2 * self.inner, self.inner
        return self.inner, self.hidden, self.hidden

    @property
    def count(self) -> int:
        return self.tokens * self.chosen

    @property
    def operations(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        width, rows, _ = self._widths
        return 2 * self.count * width * rows

    @property
    def floor_bytes(self) -> int:
        width, rows, results = self._widths
        used = np.mean([np.count_nonzero(self._routed(n).sizes) for n in range(self._rotated)])
        read = self.tokens if self.product == "gate_up" else self.count
        return int(2 * (used * rows * width + read * width + self.count * results))

    @property
    def _rotated(self) -> int:
        return 2 if self.tokens > 256 else 8

    @property
    def _aligned(self) -> int:
        matrices = self._matrices("gate_up"), self._matrices("down")
        return preferred_alignment(self.count, jnp.bfloat16, *matrices)

    def _matrices(self, product: Product) -> jax.ShapeDtypeStruct:
        shape = (2, self.inner, self.hidden) if product == "gate_up" else (self.hidden, self.inner)
        return jax.ShapeDtypeStruct((self.experts, *shape), jnp.bfloat16)

    def _routed(self, seed: int) -> ByExpert:
        rng = np.random.default_rng(seed)
        scores = rng.random((self.tokens, self.experts))
        chosen = np.argpartition(scores, self.chosen)[:, : self.chosen].astype(np.int32)
        return sort_by_expert(jnp.asarray(chosen), self.experts, self._aligned)

    def sets(self) -> list[Any]:
        width, shape = self._widths[0], self._matrices(self.product).shape
        w = jax.random.normal(jax.random.key(99), shape, jnp.bfloat16) * width**-0.5
        w = w.astype(jnp.bfloat16)  # one copy, for every set
        out = []
        for seed in range(self._rotated):
            routed = self._routed(seed)
            source = routed.rows if self.product == "gate_up" else None
            given = routed.rows.shape[0] if source is None else self.tokens
            x = jax.random.normal(jax.random.key(seed), (given, width), jnp.bfloat16)
            out.append((x, w, routed.sizes, source, routed.groups))
        return out

    def state(self) -> Any:
        return ()

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        x, w, sizes, source, groups = inputs
        op: Any = functools.partial(grouped_matmul, aligned=self._aligned)
        if "tuning" in options:
            op = matmul_kernel.grouped_matmul
        combine = activation_of("silu") if self.product == "gate_up" else None
        options.setdefault("dtype", jnp.bfloat16)
        return op(x, w, sizes, rows=source, groups=groups, combine=combine, **options), state

    def expected(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        return self.step(state, inputs, implementation="xla", dtype=jnp.float32)

    def tunings(self) -> list[Any]:
        matrices = 2 if self.product == "gate_up" else 1
        default = MatmulTuning.default(self.count, self.experts, matrices, jnp.bfloat16)
        if self.count > 8 * self.experts:
            sizes: Any = (
                (128, 128, 64, 4, 3, True),  # two programs a multiprocessor
                (128, 128, 64, 8, 3, True),
                (128, 256, 32, 8, 4, True),
                (128, 256, 64, 8, 3, True),
                (128, 256, 64, 8, 3),
                (64, 256, 32, 4, 4),
            )
        else:
            sizes = (
                (16, 64, 128, 4, 4),  # that of more rows than groups
                (16, 32, 128, 4, 4),
                (16, 32 * matrices, 128, 2, 3),
                (16, 32, 256, 2, 2),
                (16, 64, 256, 4, 3),
                (16, 128, 64, 4, 4),
                (16, 128, 128, 8, 4),
                (16, 64, 128, 4, 6),
            )
        return [default, *(MatmulTuning(*size) for size in sizes)]
