"""Cases of the suite `kernels`: products of a decode step's few rows with a layer's weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from jhybrid.layers.mlp import activation_of
from pallas_kernels import Product, skinny_matmuls
from pallas_kernels.skinny_matmul import kernel
from pallas_kernels.skinny_matmul.tuning import MAX_VECTOR_ROWS, SkinnyTuning

from .op_case import OpCase

CACHED = 2 * 60_000_000  # bytes that a round of sets must exceed, so that none is read from cache
EPS = 1e-6


@dataclass(frozen=True)
class ProductCase(OpCase):
    """Products of `rows` rows with `matrices` (groups, outputs) each, two of a group combined where
    `gated`; with a norm of the rows before (`normed`), else with a residual after."""

    layer: str
    rows: int
    inner: int
    matrices: tuple[tuple[int, int], ...]
    gated: bool = False
    normed: bool = True

    @property
    def name(self) -> str:
        return f"product/{self.rows}/{self.layer}"

    @property
    def floor_bytes(self) -> int:
        return 2 * self.inner * sum(groups * count for groups, count in self.matrices)

    @property
    def _sets(self) -> int:
        return min(8, max(2, -(-CACHED // self.floor_bytes)))

    def sets(self) -> list[Any]:
        out = []
        for seed in range(self._sets):
            key = jax.random.key(seed)
            weights = [
                jax.random.normal(jax.random.fold_in(key, n), (*each, self.inner), jnp.bfloat16)
                * jnp.bfloat16(self.inner**-0.5)
                for n, each in enumerate(self.matrices)
            ]
            out.append((jax.random.normal(key, (self.rows, self.inner), jnp.bfloat16), weights))
        return out

    def state(self) -> Any:
        """The residual stream, which keeps its size: what is added to it is small."""
        return jnp.zeros((self.rows, self.matrices[0][1]), jnp.bfloat16)

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        x, weights = inputs
        op: Any = kernel.skinny_matmuls if "tuning" in options else skinny_matmuls
        combine = activation_of("silu") if self.gated else None
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
        out = [SkinnyTuning.default(self.rows, self.inner, self.matrices, self.normed)]
        wide = ((32, 256, 2), (64, 64, 4), (64, 128, 4))
        out += [SkinnyTuning(*f, stages=s, matrix=True) for f in wide for s in (3, 4, 6, 9)]
        if self.rows <= MAX_VECTOR_ROWS:
            narrow = product((32, 64), (64, 128), (3, 6, 9))
            out += [SkinnyTuning(o, i, 2, 1, s, matrix=True, narrow=True) for o, i, s in narrow]
            out += [SkinnyTuning(2, 512, w, unroll=u) for w in (1, 2) for u in (2, 5)]
            out += [SkinnyTuning(o, 1024, 4, unroll=u) for o in (2, 4) for u in (1, 4)]
        return out


def product_cases() -> list[OpCase]:
    """Qwen3.5-4B (hidden 2,560) and Qwen3.6-27B (5,120)."""
    plain, gated = {"normed": False}, {"gated": True}
    layers: Any = (
        ("4b_qkvz_gates", 2560, ((1, 12288), (2, 32)), {}),
        ("4b_qkv", 2560, ((1, 8192), (1, 1024), (1, 1024)), {}),
        ("4b_out", 4096, ((1, 2560),), plain),
        ("4b_gate_up", 2560, ((2, 9216),), gated),
        ("4b_down", 9216, ((1, 2560),), plain),
        ("4b_head", 2560, ((1, 248320),), {}),
        ("27b_qkvz_gates", 5120, ((1, 16384), (2, 48)), {}),
        ("27b_qkv", 5120, ((1, 12288), (1, 1024), (1, 1024)), {}),
        ("27b_out", 6144, ((1, 5120),), plain),
        ("27b_gate_up", 5120, ((2, 17408),), gated),
        ("27b_down", 17408, ((1, 5120),), plain),
        ("27b_head", 5120, ((1, 248320),), {}),
    )
    return [
        ProductCase(name, rows, inner, matrices, **options)
        for name, inner, matrices, options in layers
        for rows in (1, 2, 24)
    ]


def tiny_product_cases() -> list[OpCase]:
    return [
        ProductCase("tiny_qkvz", 2, 256, ((1, 64), (2, 16))),
        ProductCase("tiny_gate_up", 8, 128, ((2, 32),), gated=True),
        ProductCase("tiny_down", 2, 256, ((1, 32),), normed=False),
    ]
