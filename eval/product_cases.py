"""Cases of the suite `kernels`: products of a decode step's few rows with a layer's weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import Product, skinny_matmuls
from pallas_kernels.skinny_matmul import kernel
from pallas_kernels.skinny_matmul.kernel import MAX_VECTOR_ROWS, SkinnyTuning

from .op_case import OpCase

CACHED = 2 * 60_000_000  # bytes that a round of sets must exceed, so that none is read from cache
EPS = 1e-6


@dataclass(frozen=True)
class ProductCase(OpCase):
    """`counts` outputs of one product each (two matrices combined where `gated`) of `rows` rows;
    with a norm of the rows before (`normed`), else with a residual after."""

    layer: str
    rows: int
    inner: int
    counts: tuple[int, ...]
    gated: bool = False
    normed: bool = True

    @property
    def name(self) -> str:
        return f"product/{self.rows}/{self.layer}"

    @property
    def floor_bytes(self) -> int:
        return 2 * (1 + self.gated) * sum(self.counts) * self.inner

    @property
    def _sets(self) -> int:
        return min(8, max(2, -(-CACHED // self.floor_bytes)))

    def sets(self) -> list[Any]:
        out = []
        for seed in range(self._sets):
            key = jax.random.key(seed)
            weights = [
                jax.random.normal(jax.random.fold_in(key, n), shape, jnp.bfloat16)
                * jnp.bfloat16(self.inner**-0.5)
                for n, count in enumerate(self.counts)
                for shape in [(1 + self.gated, count, self.inner)]
            ]
            out.append((jax.random.normal(key, (self.rows, self.inner), jnp.bfloat16), weights))
        return out

    def state(self) -> Any:
        """The residual stream, which keeps its size: what is added to it is small."""
        return jnp.zeros((self.rows, self.counts[0]), jnp.bfloat16)

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        x, weights = inputs
        op: Any = kernel.skinny_matmuls if "tuning" in options else skinny_matmuls
        combine = _swiglu if self.gated else None
        residual = None if self.normed else state
        products = [Product(w, combine, residual=residual) for w in weights]
        norm = (jnp.ones((self.inner,), jnp.float32), EPS) if self.normed else None
        found = op(x, products, norm, **options)
        return (found, state) if self.normed else ((), found[0])

    def expected(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        x, weights = inputs
        wide = (x.astype(jnp.float32), [w.astype(jnp.float32) for w in weights])
        return self.step(state.astype(jnp.float32), wide, implementation="xla")

    def tunings(self) -> list[Any]:
        default = SkinnyTuning.default(self.rows, 1 + self.gated, self.inner)
        if self.rows > MAX_VECTOR_ROWS:
            grid = product((32, 64), (128, 256), (2, 4), (3, 4, 5))
            return [default, *(SkinnyTuning(o, i, w, stages=s) for o, i, w, s in grid)]
        forms = [(1, 1024, 2), (2, 512, 1), (2, 1024, 4), (4, 1024, 4), (1, 2048, 4)]
        ahead = [SkinnyTuning(*form, ahead=n) for form in forms for n in (1, 2)]
        unrolled = [SkinnyTuning(2, 512, 1, unroll=5), SkinnyTuning(2, 1024, 4)]
        return [default, *ahead, *unrolled, SkinnyTuning(2, 1024, 4, ahead=3)]


def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def product_cases() -> list[OpCase]:
    """Qwen3.5-4B (hidden 2,560) and Qwen3.6-27B (5,120)."""
    layers: Any = (
        ("4b_qkvz_gates", 2560, (12288, 64), {}),
        ("4b_qkv", 2560, (8192, 1024, 1024), {}),
        ("4b_out", 4096, (2560,), {"normed": False}),
        ("4b_gate_up", 2560, (9216,), {"gated": True}),
        ("4b_down", 9216, (2560,), {"normed": False}),
        ("4b_head", 2560, (248320,), {}),
        ("27b_qkvz_gates", 5120, (16384, 96), {}),
        ("27b_out", 6144, (5120,), {"normed": False}),
        ("27b_gate_up", 5120, (17408,), {"gated": True}),
        ("27b_down", 17408, (5120,), {"normed": False}),
        ("27b_head", 5120, (248320,), {}),
    )
    return [
        ProductCase(name, rows, inner, counts, **options)
        for name, inner, counts, options in layers
        for rows in (2, 24)
    ]


def tiny_product_cases() -> list[OpCase]:
    return [
        ProductCase("tiny_qkvz", 2, 256, (64, 16)),
        ProductCase("tiny_gate_up", 8, 128, (32,), gated=True),
        ProductCase("tiny_down", 2, 256, (32,), normed=False),
    ]
