"""How the kernel is cut."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..device import MULTIPROCESSORS, on_hopper
from ..triton import Products
from .units import ALIGNED


@dataclass(frozen=True)
class MatmulTuning:
    rows: int  # a tile; all of one group
    columns: int  # of the output of one matrix, or of both when two are combined
    inner: int
    warps: int
    stages: int
    halve: bool = False  # tiles at most half full take half the time
    products: Products = "bf16"

    @classmethod
    def default(cls, rows: int, groups: int, matrices: int, dtype: DTypeLike) -> MatmulTuning:
        """By the mean number of rows a group. Few: the matrices are streamed, by small programs
        where each is told its group. Many: tiles as large as registers allow."""
        mean = rows / groups
        if dtype == jnp.float32:
            size = 16 if mean <= 8 else 64
            return cls(size, 64, 32, warps=4, stages=2, products="tf32x3")
        if rows <= groups:
            return cls(16, 32 * matrices, 128, warps=2, stages=4)
        if mean <= 8:
            return cls(16, 64, 128, warps=4, stages=4)
        if mean <= 32:
            return cls(32, 128, 64, warps=4, stages=4)
        if mean <= 96:
            return cls(64, 128, 64, warps=4, stages=4)
        return cls(128, 256, 64, warps=8, stages=4, halve=True)


@dataclass(frozen=True)
class HopperTuning:
    """Of the kernel for groups of many rows on Hopper.

    Two consumers at most: more would wait for ever for registers that a block does not have.
    """

    heights: tuple[int, ...] = (32, 64, 96, 112, 120, 128, 136, 144)  # of pieces, rising
    columns: int = 256  # of a tile: of all matrices together
    inner: int = 64  # of a step: as wide as shared memory is swizzled
    consumers: int = 2  # groups of threads that multiply, each a share of the columns
    stages: int = 4  # steps whose operands are loaded or on their way
    chunk: int = 48  # rows of results that a group of consumers turns at once
    slots: int = 2  # of that many rows, for each group of consumers
    blocks: int = MULTIPROCESSORS

    @property
    def tallest(self) -> int:
        return self.heights[-1]

    def covers(self, w: Array | jax.ShapeDtypeStruct) -> bool:
        """Whether the kernel multiplies by such matrices, two a group at most."""
        matrices = 1 if len(w.shape) == 3 else w.shape[1]
        outputs, inner = w.shape[-2:]
        if matrices > 2 or w.dtype != jnp.bfloat16:
            return False
        whole = outputs % (self.columns // matrices) == 0 and inner % self.inner == 0
        return whole and inner // self.inner >= self.stages  # one unit fills every stage


def hopper_tuning(
    rows: int, x: Array, w: Array, aligned: int, dtype: DTypeLike | None, interpret: bool
) -> HopperTuning | None:
    """None where that kernel does not cover the case."""
    form = HopperTuning()
    if interpret:  # slow, so small
        consumers = 2 if w.ndim == 3 else 1
        form = HopperTuning((16, 64), columns=128, consumers=consumers, stages=2, blocks=2)
    halves = x.dtype == jnp.bfloat16 and dtype == jnp.bfloat16
    fits = halves and form.covers(w) and rows >= form.tallest and aligned % ALIGNED == 0
    lowered = jax.default_backend() != "gpu"  # for a GPU elsewhere, or interpreted
    return form if fits and (lowered or on_hopper()) else None
