"""Prefill of a few tokens by one kernel: a state's columns stay in a program, tile after tile.

One program per (value block, value head, chain of segments), each of which makes its tile's small
matrices for itself: three launches and a scan's start would be most of the time of 32 tokens, and
so would 32 steps of the recurrence, one behind the other.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..ragged import Segments, chain_at, chain_end
from ..triton import dividing_block, iota, power_of_two_blocks, triton_call
from .channel_decay import sum_masks
from .inputs import Activation, Gates
from .short_tile import Blocks, Numerics, Rows, ShortTuning, apply, channel_tile, head_tile
from .tile import OFF, log2_decay

MOST_TOKENS = 32


class _Inputs(NamedTuple):
    layer: Any  # [G] of each segment
    gate_set: Any  # [G]
    cu: Any  # [G1]
    load: Any
    store: Any
    end: Any
    qkv: Any
    gates: Gates
    pool: Any
    masks: Any  # KDA: sums of log-decays, see channel_decay.py


class _Program:
    """Its chain of segments, and its block of values of a head."""

    def __init__(
        self, inputs: _Inputs, o_ref: Any, activation: Activation, tuning: ShortTuning,
        interpret: bool,
    ):  # fmt: skip
        self.inputs, self.o_ref, self.activation = inputs, o_ref, activation
        self.block, self.head, self.chain = (pl.program_id(axis) for axis in range(3))
        self.segment, self.slot, self.behind = chain_at(self.chain, inputs.load, inputs.end)
        self.key_dim, value_dim = inputs.pool.shape[3:]
        group = inputs.pool.shape[2] // inputs.qkv.shape[1]
        self.key_head, self.size = self.head // group, tuning.tile
        self.cuts = power_of_two_blocks(self.key_dim)
        width = dividing_block(value_dim, tuning.value_block)
        first = 2 * self.key_dim + (self.head % group) * value_dim
        self.values_in = pl.ds(first + self.block * width, width)
        self.values = pl.ds(self.block * width, width)
        self.width, self.interpret = width, interpret
        self.bf16 = inputs.qkv.dtype == jnp.bfloat16
        self.numerics = Numerics.of(self.bf16, interpret)

    def read_state(self) -> Blocks:
        at = jnp.maximum(self.slot, 0), self.inputs.layer[self.segment], self.head
        mask = jnp.broadcast_to(self.slot >= 0, (1, 1))
        return [
            plt.load(
                self.inputs.pool.at[(*at, pl.ds(*cut), self.values)], mask=mask, other=0.0
            ).astype(jnp.float32)
            for cut in self.cuts
        ]  # fmt: skip

    def write_state(self, ref: Any, segment: Array, state: Blocks) -> None:
        slot, layer = self.inputs.store[segment], self.inputs.layer[segment]

        @pl.when(slot >= 0)
        def _() -> None:
            for cut, s in zip(self.cuts, state, strict=True):
                ref[slot, layer, self.head, pl.ds(*cut), self.values] = s.astype(ref.dtype)

    def rows(self, segment: Array, token: Array, behind: Array) -> Rows:
        inputs, valid = self.inputs, token + iota((self.size,), 0) < behind

        def load(ref: Any, *index: Any, other: float = 0.0) -> Array:
            mask = valid if len(index) == 1 else valid[:, None]
            return plt.load(ref.at[(pl.ds(token, self.size), *index)], mask=mask, other=other)

        def channels(first: int) -> Blocks:
            parts = (pl.ds(first + offset, width) for offset, width in self.cuts)
            return [load(inputs.qkv, self.key_head, part) for part in parts]

        number, gates = inputs.gate_set[segment], inputs.gates
        rate = gates.A_log[number, self.head]

        def log_decay(*part: Any) -> Array:
            z = load(gates.decay, self.head, *part, other=OFF).astype(jnp.float32)
            bias = gates.dt_bias[(number, self.head, *part)]
            z = z + (bias[None, :] if part else bias)
            return log2_decay(z, rate, self.activation, self.bf16, self.interpret)

        q, k = channels(0), channels(self.key_dim)
        v = load(inputs.qkv, self.key_head, self.values_in)
        per_channel = len(gates.decay.shape) == 3
        g = [log_decay(pl.ds(*cut)) for cut in self.cuts] if per_channel else log_decay()
        beta = load(gates.beta, self.head, other=OFF).astype(jnp.float32)
        return Rows(q, k, v, g, self.activation.strength(beta))

    def step(self, segment: Array, begin: Array, behind: Array, index: Array, state: Blocks) -> Any:
        token, masks = begin + index * self.size, self.inputs.masks
        rows = self.rows(segment, token, behind)
        if masks is None:
            tile = head_tile(rows, self.key_dim, self.numerics)
        else:
            leaf = decay_leaf(self.size, self.bf16)
            tile = channel_tile(rows, self.key_dim, leaf, lambda n: masks[n], self.numerics)
        o, state = apply(tile, rows, state, self.numerics)
        self.store_outputs(token, behind, o)
        return state

    def store_outputs(self, token: Array, behind: Array, o: Array) -> None:
        valid = (token + iota((self.size,), 0) < behind)[:, None]
        at = self.o_ref.at[pl.ds(token, self.size), self.head, self.values]
        plt.store(at, o.astype(self.o_ref.dtype), mask=valid)

    def run(self, new_pool_ref: Any) -> None:
        cu = self.inputs.cu

        def segment_step(segment: Array, state: Blocks) -> Blocks:
            begin, behind = cu[segment], cu[segment + 1]
            step = functools.partial(self.step, segment, begin, behind)
            state = lax.fori_loop(0, self.tiles(behind - begin), step, state)
            self.write_state(new_pool_ref, segment, state)
            return state

        lax.fori_loop(self.chain, self.behind, segment_step, self.read_state())

    def tiles(self, tokens: Array) -> Array:
        return lax.div(tokens + (self.size - 1), jnp.int32(self.size))

    def clear_padding(self) -> None:
        """By the program of the chain behind the last, which has no segments."""
        last, size = self.inputs.load.shape[0], self.o_ref.shape[0]
        begin = self.inputs.cu[last]

        def clear(index: Array, carry: Array) -> Array:
            zeros = jnp.zeros((self.size, self.width), jnp.float32)
            self.store_outputs(begin + index * self.size, jnp.int32(size), zeros)
            return carry

        steps = jnp.where(self.chain == last, self.tiles(size - begin), 0)
        lax.fori_loop(jnp.int32(0), steps, clear, jnp.int32(0))


def decay_leaf(tile: int, bf16: bool) -> int:
    """As `decay_leaf` of `tuning.PrefillTuning`."""
    return min(tile, 16 if bf16 else 4)


def _kernel(*refs: Any, activation: Activation, tuning: ShortTuning, interpret: bool) -> None:
    *inputs, o_ref, new_pool_ref = refs
    program = _Program(_Inputs(*inputs), o_ref, activation, tuning, interpret)
    program.run(new_pool_ref)
    program.clear_padding()


def short_prefill(
    qkv: Array,
    gates: Gates,
    pool: Array,
    layers: Array,
    gate_sets: Array | None,
    segments: Segments,
    activation: Activation,
    *,
    tuning: ShortTuning | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`prefill.ragged_prefill` for up to MOST_TOKENS tokens."""
    tuning = tuning or ShortTuning()
    count, (heads, _, value_dim) = segments.load.shape[0], pool.shape[2:]
    per_channel, bf16 = gates.decay.ndim == 3, qkv.dtype == jnp.bfloat16
    leaf = decay_leaf(tuning.tile, bf16)
    masks = sum_masks(tuning.tile, leaf, qkv.dtype) if per_channel else None
    sets = jnp.zeros_like(layers) if gate_sets is None else gate_sets
    inputs = _Inputs(
        *(layers, sets, segments.cu, segments.load, segments.store, chain_end(segments)),
        *(qkv, gates, pool, masks),
    )
    call = triton_call(
        functools.partial(_kernel, activation=activation, tuning=tuning, interpret=interpret),
        "gated_delta_rule_short_prefill",
        (value_dim // dividing_block(value_dim, tuning.value_block), heads, count + 1),
        (
            jax.ShapeDtypeStruct((qkv.shape[0], heads, value_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        warps=tuning.warps,
        aliases={11: 1},
        interpret=interpret,
    )
    o, pool = call(*inputs)
    return o, pool
