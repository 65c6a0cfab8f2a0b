"""How the kernels of a prefill are cut. Block sizes change speed, never results' meaning."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..triton import Products


@dataclass(frozen=True)
class PrefillTuning:
    """`products` is the precision of the matrix products, and decides in which type the kernels
    hand tiles to each other."""

    products: Products = "f16"
    leaf_products: Products = "tf32"  # factors from 2^-104 to 2^104: not for float16
    chunk: int = 64
    invert_warps: int = 1
    decay_leaf: int = 16  # KDA: rows whose decays share one anchor; see channel_decay.py
    key_block: int = 128  # channels of keys taken at a time before the scan
    product_warps: int = 2
    value_block: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    transposed: bool = True  # carry S^T in registers as the left operand of every product
    turn_by_product: bool = False  # transposed values by a product, else through shared memory

    @property
    def tile_dtype(self) -> DTypeLike:
        return jnp.float16 if self.products == "f16" else jnp.float32

    @property
    def fast_gates(self) -> bool:
        """Activations of gates by approximate instructions."""
        return self.products == "f16"

    @classmethod
    def default(
        cls, dtype: DTypeLike, per_channel: bool, columns: int, multiprocessors: int = 132
    ) -> PrefillTuning:
        """bf16 inputs: 5e-3 relative RMS against float64. float32 inputs: 1e-5.

        `columns` of states are carried at once: sequences x value heads x channels of values. The
        device's `multiprocessors` are an H200's.

        Stages decide how many tiles a scan holds in shared memory: what is asked for at the end of
        a step is used two steps on (three stages), and no form has room for a step more but blocks
        of 32. All forms take more than half of the shared memory. They should: two programs that
        fit on one multiprocessor are put there while others have none, and the scan then takes as
        long as the pair does.
        """
        if dtype == jnp.bfloat16 and per_channel:
            return cls()
        if dtype == jnp.bfloat16 and columns <= 32 * multiprocessors:
            return cls(product_warps=4, transposed=False)
        if dtype == jnp.bfloat16:  # a step of 64 columns takes less than two of 32
            return cls(product_warps=4, value_block=64, turn_by_product=True)
        return cls(
            products="tf32x3",
            leaf_products="tf32x3",
            decay_leaf=4,
            key_block=32,
            product_warps=2 if per_channel else 8,
            scan_warps=8,
            scan_stages=1,
            transposed=False,
        )
