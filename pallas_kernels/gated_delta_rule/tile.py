"""What the kernels of a prefill share: their options, the arrays they pass on, a program's tile.

The kernels before the scan give a tile of tokens to one warp, which takes it in blocks of 16 rows,
the smallest the tensor cores multiply. A warp alone waits at no barrier and holds little, so that
many tiles are in flight on a multiprocessor: only that hides chains of small products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import Dot, barrier, iota, power_of_two_blocks
from .inputs import Activation
from .reference import L2_EPS
from .tuning import PrefillTuning

BLOCK = 16  # rows


@dataclass(frozen=True)
class Options:
    """What the kernels of a prefill are built for."""

    key_dim: int
    value_dim: int
    activation: Activation
    tuning: PrefillTuning
    outputs: bool  # or states alone
    interpret: bool


class Inputs(NamedTuple):
    start: Any  # [N] first token of a tile
    rows: Any  # [N] tokens in it; 0 in unused tiles
    gate_set: Any  # [N] which row of A_log and dt_bias a tile takes
    qkv: Any
    decay: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    masks: Any = None  # KDA: sums of log-decays, see channel_decay.py


class Prepared(NamedTuple):
    """What the scan reads. In GDN queries and keys are shared by the value heads of a key head."""

    t: Any  # [N, H, C, C]; A before it is inverted
    beta: Any  # [N, H, C]
    value_size: Any  # [H, N] the tile's largest value
    decay: Any  # over the tile: [N, H], KDA [N, H, K]
    k: Any  # [N, Hk, C, K]; KDA: decayed from the tile's start
    q: Any = None  # likewise; None without outputs
    p: Any = None  # [N, H, C, C]; None without outputs
    k_to_end: Any = None  # KDA: [N, H, C, K]
    from_start: Any = None  # GDN: decays of rows [N, H, C]
    to_end: Any = None


def block_rows(block: Any) -> Any:
    return pl.ds(block * BLOCK, BLOCK)


class Tile:
    """A program's tile: loads of its tokens, stores to its cells, products in its precisions."""

    def __init__(self, inputs: Inputs, out: Prepared, options: Options):
        tuning, interpret = options.tuning, options.interpret
        self.inputs, self.out, self.options = inputs, out, options
        self.head, self.index = pl.program_id(0), pl.program_id(1)
        self.group = inputs.beta.shape[1] // inputs.qkv.shape[1]
        self.blocks = tuning.chunk // BLOCK
        self.start, self.rows = inputs.start[self.index], inputs.rows[self.index]
        self.gate_set = inputs.gate_set[self.index]
        self.dot = Dot(tuning.products, interpret)
        self.leaf_dot = Dot(tuning.leaf_products, interpret)

    def valid(self, block: Any) -> Array:
        return block * BLOCK + iota((BLOCK,), 0) < self.rows

    def load(self, block: Any, ref: Any, *index: Any) -> Array:
        """Of the block's tokens; zeros behind the tile's last."""
        valid = self.valid(block)
        mask = valid if len(index) == 1 else valid[:, None]
        at = ref.at[(pl.ds(self.start + block * BLOCK, BLOCK), *index)]
        return plt.load(at, mask=mask, other=0.0)

    def unit_rows(
        self, block: Any, key_head: Any, parts: list[tuple[int, int]], queries: bool = False
    ) -> list[Array]:
        """Keys, or queries times K**-0.5, of length 1: float32 [16, Kb] for each part of K."""
        first = 0 if queries else self.options.key_dim
        loaded = [
            self.load(block, self.inputs.qkv, key_head, pl.ds(first + o, w)).astype(jnp.float32)
            for o, w in parts
        ]
        squares = functools.reduce(jnp.add, (jnp.sum(x * x, axis=1) for x in loaded))
        scale = lax.rsqrt(squares + L2_EPS) * (self.options.key_dim**-0.5 if queries else 1.0)
        return [x * scale[:, None] for x in loaded]

    def beta(self, block: Any, head: Any) -> Array:
        logits = self.load(block, self.inputs.beta, head).astype(jnp.float32)
        return jnp.where(self.valid(block), self.options.activation.strength(logits), 0.0)

    def log_decay(self, block: Any, z: Array, rate: Array, bias: Array) -> Array:
        """g [16] or [16, Kb]; 0 behind the tile's last token."""
        valid = self.valid(block) if z.ndim == 1 else self.valid(block)[:, None]
        g = self.options.activation.log_decay(z.astype(jnp.float32), rate, bias)
        return jnp.where(valid, g, 0.0)

    def store_value_size(self, key_head: Any, place: Any, head: Any) -> None:
        """The largest value of the head that is number `place` of its group."""
        first = 2 * self.options.key_dim + place * self.options.value_dim
        largest = jnp.zeros((), jnp.float32)
        for offset, width in power_of_two_blocks(self.options.value_dim):
            sizes = jnp.zeros((BLOCK, width), self.inputs.qkv.dtype)
            for block in range(self.blocks):
                v = self.load(block, self.inputs.qkv, key_head, pl.ds(first + offset, width))
                sizes = jnp.maximum(sizes, jnp.abs(v))
            largest = jnp.maximum(largest, jnp.max(sizes.astype(jnp.float32)))
        self.out.value_size[head, self.index] = largest

    def store_block(self, ref: Any, head: Any, i: Any, j: Any, x: Array) -> None:
        """Block (i, j) of a square cell."""
        ref[self.index, head, block_rows(i), block_rows(j)] = x.astype(ref.dtype)

    def clear_above(self, head: Any, block: Any) -> None:
        """Blocks right of the diagonal one."""

        def clear(j: Array, carry: Array) -> Array:
            for ref in (self.out.t, self.out.p):
                if ref is not None:
                    self.store_block(ref, head, block, j, jnp.zeros((BLOCK, BLOCK)))
            return carry

        lax.fori_loop(block + 1, self.blocks, clear, jnp.int32(0))

    def barrier(self) -> None:
        barrier(self.options.interpret)
