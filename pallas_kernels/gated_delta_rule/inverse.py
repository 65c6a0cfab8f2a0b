"""T = (I + A)^-1 diag(b) of strictly lower triangular tiles A: second kernel of a prefill.

One warp takes a tile of a head, in blocks of 16 rows: they are the smallest that the tensor cores
multiply, a block is 8 registers a thread, and a warp alone never waits at a barrier. So that many
tiles are in flight on a multiprocessor, which is what hides a chain of small products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ..triton import Dot, iota, triton_call
from .tile import BLOCK
from .tuning import PrefillTuning


def block_inverse(a: Array, dot: Dot) -> Array:
    """(I + A)^-1 of one strictly lower triangular block within a kernel, doubled from single rows
    by block elimination.

    An exact formula that stays small for repeated keys, where a product of powers of A does not.
    """
    size = a.shape[0]
    i, j = iota(a.shape, 0), iota(a.shape, 1)
    inverse = jnp.where(i == j, 1.0, jnp.where(halving_mask(size, 0), -a, 0.0))
    for level in range(1, size.bit_length() - 1):
        below = jnp.where(halving_mask(size, level), a, 0.0)
        # In this order the left factors are in registers, where products leave them.
        inverse = inverse - dot(dot(inverse, below), inverse)
    return inverse


def halving_mask(size: int, level: int) -> Array:
    """Pairs (i, j) of one block of 2^(level+1), i in its upper half and j in its lower."""
    i, j = iota((size, size), 0) >> level, iota((size, size), 1) >> level
    return ((i & 1) == 1) & (j == i - 1)


def _kernel(rows_ref: Any, beta_ref: Any, a_ref: Any, t_ref: Any, *, dot: Dot) -> None:
    """By rows of blocks: T_ij = -T_ii (sum over m from j to i - 1 of A_im T_mj)."""
    cell = pl.program_id(1), pl.program_id(0)
    count = a_ref.shape[-1] // BLOCK

    def at(block: int) -> Any:
        return pl.ds(block * BLOCK, BLOCK)

    @pl.when(rows_ref[cell[0]] > 0)
    def _() -> None:
        done: list[list[Array]] = []
        for i in range(count):
            a = [a_ref[(*cell, at(i), at(j))].astype(jnp.float32) for j in range(i + 1)]
            last = block_inverse(a[i], dot)
            row = []
            for j in range(i):
                known = (dot(a[m], done[m][j]) for m in range(j, i))
                row.append(-dot(last, functools.reduce(jnp.add, known)))
            done.append([*row, last])
            for j, x in enumerate(done[i]):
                x = x * beta_ref[(*cell, at(j))][None, :]
                t_ref[(*cell, at(i), at(j))] = x.astype(t_ref.dtype)


def invert(a: Array, beta: Array, rows: Array, tuning: PrefillTuning, interpret: bool) -> Array:
    """T [N, H, C, C] in the place of A, whose upper triangle is zero; beta [N, H, C].

    Tiles without rows are left as they are.
    """
    call = triton_call(
        functools.partial(_kernel, dot=Dot(tuning.products, interpret)),
        "gated_delta_rule_invert",
        (a.shape[1], a.shape[0]),
        (jax.ShapeDtypeStruct(a.shape, a.dtype),),
        warps=tuning.invert_warps,
        aliases={2: 0},
        interpret=interpret,
    )
    return call(rows, beta, a)[0]
