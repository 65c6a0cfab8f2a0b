"""How the kernel is cut."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..triton import Products


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
    def default(cls, rows: int, groups: int, dtype: DTypeLike) -> MatmulTuning:
        """By the mean number of rows a group. Few: the matrices are streamed, whatever the tile.
        Many: tiles as large as registers allow."""
        mean = rows / groups
        if dtype == jnp.float32:
            size = 16 if mean <= 8 else 64
            return cls(size, 64, 32, warps=4, stages=2, products="tf32x3")
        if mean <= 8:
            return cls(16, 64, 128, warps=4, stages=4)
        if mean <= 32:
            return cls(32, 128, 64, warps=4, stages=4)
        if mean <= 96:
            return cls(64, 128, 64, warps=4, stages=4)
        return cls(128, 256, 64, warps=8, stages=3, halve=True)
