"""One token for each of N sequences: an elementwise kernel over the states, in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import barrier, dividing_block, multiply_add, power_of_two_blocks, triton_call
from .inputs import Activation, Gates
from .key_blocks import l2_scales, over_keys, sum_all

TWO_EACH = 264  # programs: two for each multiprocessor of an H200
MOST_KEYS = 128  # with a value block of 64 and 4 warps, a state is then 64 registers a thread


@dataclass(frozen=True)
class DecodeTuning:
    value_block: int = 64
    warps: int = 4

    @classmethod
    def default(cls, batch: int, heads: int, key_dim: int, value_dim: int) -> DecodeTuning:
        """Few programs: small blocks, to spread one state over many multiprocessors."""
        states = batch * heads
        if states <= 128:
            return cls(value_block=16, warps=2)
        if states * value_dim < TWO_EACH * 64 or key_dim > MOST_KEYS:
            return cls(value_block=32)
        return cls()


def _kernel(
    layer_ref: Any,
    slot_ref: Any,
    qkv_ref: Any,
    z_ref: Any,
    beta_ref: Any,
    rate_ref: Any,
    bias_ref: Any,
    pool_ref: Any,
    o_ref: Any,
    new_pool_ref: Any,
    *,
    activation: Activation,
    tuning: DecodeTuning,
    interpret: bool,
) -> None:
    block, head, row = (pl.program_id(axis) for axis in range(3))
    (heads, key_dim, value_dim), width = pool_ref.shape[2:], tuning.value_block
    group = heads // qkv_ref.shape[1]
    key_head = head // group
    slot, layer = slot_ref[row], layer_ref[0]
    cuts = list(power_of_two_blocks(key_dim))
    keys = [pl.ds(*cut) for cut in cuts]
    values = pl.ds(block * width, width)

    def read(start: Any, size: int) -> Array:
        return qkv_ref[row, key_head, pl.ds(start, size)]

    @pl.when(slot < 0)
    def _() -> None:  # padding: leave nothing uninitialised behind
        o_ref[row, head, values] = jnp.zeros((width,), o_ref.dtype)

    @pl.when(slot >= 0)
    def _() -> None:
        # All loads, the state's first, before anything waits for one of them. Compilers would move
        # some to their uses: no access passes a barrier, and no use leaves its branch, which is
        # always taken (layers count from 0).
        cells = [pool_ref.at[slot, layer, head, part, values] for part in keys]
        # A state is read once: a line of L1 for it is work for nothing (1 to 2 % on an H200), and
        # volatile loads leave none. `plt.load` has no cache modifier that says so.
        raw_state = [plt.load(cell, volatile=True) for cell in cells]
        barrier(interpret)
        raw_q, raw_k = (
            [read(start + first, size) for first, size in cuts] for start in (0, key_dim)
        )
        v = read(2 * key_dim + (head % group) * value_dim + block * width, width)
        logit, rate = beta_ref[row, head], rate_ref[head]
        if len(z_ref.shape) == 3:
            z = [(z_ref[row, head, part], bias_ref[head, part]) for part in keys]
        else:
            z = [(z_ref[row, head], bias_ref[head])] * len(keys)
        barrier(interpret)

        @pl.when(layer >= 0)
        def _() -> None:
            q, k, state = (
                [x.astype(jnp.float32) for x in parts] for parts in (raw_q, raw_k, raw_state)
            )
            q_scale, k_scale = l2_scales(q, k, key_dim)
            both = sum_all(x * y for x, y in zip(q, k, strict=True))
            beta = activation.strength(logit.astype(jnp.float32))
            g = [activation.log_decay(x.astype(jnp.float32), rate, bias) for x, bias in z]
            decay = [jnp.exp(x) for x in g]
            # Keys and queries decay for the state in both sums over it: a decayed copy of the
            # state would cost the registers of a fourth program on a multiprocessor.
            faded_k, faded_q = (
                [x * d for x, d in zip(parts, decay, strict=True)] for parts in (k, q)
            )
            known, asked = over_keys(state, faded_k), over_keys(state, faded_q)
            # For k before its normalisation: the sums over the state wait for the state alone.
            new = k_scale * beta * (v.astype(jnp.float32) - k_scale * known)
            o_ref[row, head, values] = (q_scale * (asked + new * both)).astype(o_ref.dtype)
            for part, s, x, d in zip(keys, state, k, decay, strict=True):
                d = jnp.broadcast_to(d[:, None] if d.ndim else d, s.shape)
                after = multiply_add(s, d, x[:, None] * new[None, :], interpret)
                at = new_pool_ref.at[slot, layer, head, part, values]
                plt.store(at, after.astype(new_pool_ref.dtype))


def decode(
    qkv: Array,
    gates: Gates,
    pool: Array,
    layer: int | Array,
    slots: Array,
    activation: Activation,
    *,
    tuning: DecodeTuning | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`decode_gated_delta_rule` as a kernel: a program for each (value block, head, sequence)."""
    batch, (heads, key_dim, value_dim) = qkv.shape[0], pool.shape[2:]
    tuning = tuning or DecodeTuning.default(batch, heads, key_dim, value_dim)
    width = dividing_block(value_dim, tuning.value_block)
    tuning = replace(tuning, value_block=width)
    call = triton_call(
        functools.partial(_kernel, activation=activation, tuning=tuning, interpret=interpret),
        "gated_delta_rule_decode",
        (value_dim // width, heads, batch),
        (
            jax.ShapeDtypeStruct((batch, heads, value_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        warps=tuning.warps,
        aliases={7: 1},
        interpret=interpret,
    )
    o, pool = call(jnp.asarray([layer], jnp.int32), slots, qkv, *gates, pool)
    return o, pool
