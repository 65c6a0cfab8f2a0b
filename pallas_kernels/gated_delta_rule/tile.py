"""What the kernels of a prefill share: their options, the arrays they pass on, a program's tile.

KDA's products and the inverse give a tile of tokens to one warp or two, which take it in blocks of
16 rows, the smallest the tensor cores multiply. So few warps wait little for each other and hold
little, so that many tiles are in flight on a multiprocessor: only that hides chains of small
products. GDN's products are two of the whole tile, and no chain: eight warps share them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import Dot, barrier, exp2, iota, log2, multiply_add, power_of_two_blocks
from .inputs import Activation
from .reference import L2_EPS
from .tuning import PrefillTuning

BLOCK = 16  # rows
LOG2_E = 1.4426950408889634
OFF = -1e30  # a logit without effect: no decay, and beta 0


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
    k: Any  # [N, Hk, C, K]; KDA: decayed from the tile's start
    q: Any = None  # likewise; None without outputs
    p: Any = None  # [N, H, C, C]; None without outputs
    k_to_end: Any = None  # KDA: [N, H, C, K]
    decay: Any = None  # KDA: over the tile [N, H, K]
    from_start: Any = None  # GDN: decays of rows [N, H, C]; the last row's is the tile's
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
        self.size, self.blocks = tuning.chunk, tuning.chunk // BLOCK
        self.start, self.rows = inputs.start[self.index], inputs.rows[self.index]
        self.gate_set = inputs.gate_set[self.index]
        self.dot = Dot(tuning.products, interpret)
        self.leaf_dot = Dot(tuning.leaf_products, interpret)

    def load(self, first: Any, size: int, ref: Any, *index: Any, other: float = 0.0) -> Array:
        """`size` tokens from the tile's `first`; `other` behind the tile's last."""
        valid = first + iota((size,), 0) < self.rows
        mask = valid if len(index) == 1 else valid[:, None]
        at = ref.at[(pl.ds(self.start + first, size), *index)]
        return plt.load(at, mask=mask, other=other)

    def load_rows(
        self, first: Any, size: int, key_head: Any, channel: Any, parts: list[tuple[int, int]]
    ) -> list[Array]:
        """Channels of a key head from its `channel`, in parts [size, width], as they are."""
        at = (self.inputs.qkv, key_head)
        return [self.load(first, size, *at, pl.ds(channel + o, w)) for o, w in parts]

    def load_keys(
        self, first: Any, size: int, key_head: Any, parts: list[tuple[int, int]]
    ) -> tuple[list[Array] | None, list[Array]]:
        """Queries, if there are outputs, and keys: both on their way before either is used."""
        rows = functools.partial(self.load_rows, first, size, key_head)
        queries = rows(0, parts) if self.options.outputs else None
        return queries, rows(self.options.key_dim, parts)

    def load_values(self, key_head: Any, place: Any) -> list[Array]:
        """All values of a head, given by its place in its group."""
        value_dim = self.options.value_dim
        first = 2 * self.options.key_dim + place * value_dim
        return self.load_rows(0, self.size, key_head, first, list(power_of_two_blocks(value_dim)))

    def store_value_size(self, head: Any, values: list[Array]) -> None:
        """The largest of a head's values."""
        largest = (jnp.max(jnp.abs(x.astype(jnp.float32))) for x in values)
        self.out.value_size[head, self.index] = functools.reduce(jnp.maximum, largest)

    def unit_scale(self, parts: list[Array]) -> Array:
        """What gives rows length 1: [size, 1]."""
        squares = (jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1) for x in parts)
        return lax.rsqrt(functools.reduce(jnp.add, squares) + L2_EPS)[:, None]

    def beta(self, first: Any, size: int, head: Any) -> Array:
        logits = self.load(first, size, self.inputs.beta, head, other=OFF)
        return self.options.activation.strength(logits.astype(jnp.float32))

    def log2_decay(self, first: Any, size: int, *index: Any) -> Array:
        """g log2(e) of `size` tokens from the tile's `first`: [size] of a head, or [size, Kb] of
        a head and channels. 0 behind the tile's last token."""
        inputs, activation = self.inputs, self.options.activation
        z = self.load(first, size, inputs.decay, *index, other=OFF).astype(jnp.float32)
        bias = inputs.dt_bias[(self.gate_set, *index)]
        z = z + (bias if z.ndim == 1 else bias[None, :])
        A_log, fast = inputs.A_log[self.gate_set, index[0]], self.options.tuning.fast_gates
        return log2_decay(z, A_log, activation, fast, self.options.interpret)

    def exp2(self, x: Array) -> Array:
        return exp2(x, self.options.interpret)

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


def log2_decay(
    z: Array, A_log: Array, activation: Activation, fast: bool, interpret: bool
) -> Array:
    """g log2(e) of logits to which dt_bias has been added; `fast`: by approximate instructions."""
    if fast and activation.lower_bound is None:
        return -jnp.exp(A_log) * log2_softplus(z, interpret)
    return LOG2_E * activation.log_decay(z, A_log, jnp.zeros((), jnp.float32))


def log2_softplus(x: Array, interpret: bool) -> Array:
    """log2(1 + e^x) to 5e-6, or 2e-7 where it is above 0.05."""
    fma = functools.partial(multiply_add, interpret=interpret)
    small = exp2(-LOG2_E * jnp.abs(x), interpret)
    whole = log2(1.0 + small, interpret)
    e, half = (jnp.full(x.shape, y, jnp.float32) for y in (LOG2_E, -0.5 * LOG2_E))
    series = small * fma(half, small, e)  # 1 + small would lose it
    return fma(e, jnp.maximum(x, 0.0), jnp.where(small < 2.0**-8, series, whole))
