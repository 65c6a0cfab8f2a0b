"""One token for each of N sequences: an elementwise kernel over the states, in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import dividing_block, power_of_two_blocks, triton_call
from .inputs import Activation, Gates
from .reference import L2_EPS


@dataclass(frozen=True)
class DecodeTuning:
    value_block: int = 64
    warps: int = 4
    evict_first: bool = (
        False  # of cached lines: states are larger than the cache and read once a step
    )

    @classmethod
    def default(cls, batch: int, heads: int) -> DecodeTuning:
        """Few programs: small blocks, to spread one state over many multiprocessors."""
        if batch * heads <= 128:
            return cls(value_block=16, warps=2)
        if batch * heads <= 1024:
            return cls(value_block=32, warps=4)
        return cls(value_block=64, warps=4)


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
) -> None:
    block, head, row = (pl.program_id(axis) for axis in range(3))
    (heads, key_dim, value_dim), width = pool_ref.shape[2:], tuning.value_block
    group = heads // qkv_ref.shape[1]
    key_head = head // group
    slot, layer = slot_ref[row], layer_ref[0]
    values = pl.ds(block * width, width)
    policy = "evict_first" if tuning.evict_first else None
    blocks = power_of_two_blocks(key_dim)

    def read(first: Any, size: int) -> Array:
        return qkv_ref[row, key_head, pl.ds(first, size)].astype(jnp.float32)

    # Read before the slot is known to be one: no load waits for another.
    q = [read(offset, size) for offset, size in blocks]
    k = [read(key_dim + offset, size) for offset, size in blocks]
    v = read(2 * key_dim + (head % group) * value_dim + block * width, width)
    beta = activation.strength(beta_ref[row, head].astype(jnp.float32))
    rate = rate_ref[head]
    if len(z_ref.shape) == 3:
        keys = [pl.ds(*cut) for cut in blocks]
        z = [z_ref[row, head, part].astype(jnp.float32) for part in keys]
        bias = [bias_ref[head, part] for part in keys]
        g = [activation.log_decay(x, rate, b) for x, b in zip(z, bias, strict=True)]
        decay = [jnp.exp(x)[:, None] for x in g]
    else:
        g = activation.log_decay(z_ref[row, head].astype(jnp.float32), rate, bias_ref[head])
        decay = [jnp.exp(g)] * len(blocks)

    @pl.when(slot < 0)
    def _() -> None:  # padding: leave nothing uninitialised behind
        o_ref[row, head, values] = jnp.zeros((width,), o_ref.dtype)

    @pl.when(slot >= 0)
    def _() -> None:
        keys = [pl.ds(*cut) for cut in blocks]
        states = [
            plt.load(pool_ref.at[slot, layer, head, part, values], eviction_policy=policy)
            for part in keys
        ]
        q_scale = jax.lax.rsqrt(_sum(x * x for x in q) + L2_EPS) * key_dim**-0.5
        k_scale = jax.lax.rsqrt(_sum(x * x for x in k) + L2_EPS)
        unit = [x * k_scale for x in k]
        states = [s.astype(jnp.float32) * d for s, d in zip(states, decay, strict=True)]
        # S'^T q + (k . q) b u: the two reductions over the state wait for nothing but the state.
        known = sum(jnp.sum(s * x[:, None], axis=0) for s, x in zip(states, unit, strict=True))
        asked = sum(jnp.sum(s * x[:, None], axis=0) for s, x in zip(states, q, strict=True))
        new = beta * (v - known)
        o = q_scale * (asked + new * _sum(x * y for x, y in zip(q, unit, strict=True)))
        o_ref[row, head, values] = o.astype(o_ref.dtype)
        for part, s, x in zip(keys, states, unit, strict=True):
            plt.store(
                new_pool_ref.at[slot, layer, head, part, values],
                (s + x[:, None] * new[None, :]).astype(new_pool_ref.dtype),
                eviction_policy=policy,
            )


def _sum(parts: Any) -> Array:
    return sum(jnp.sum(part) for part in parts)  # pyright: ignore[reportReturnType]


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
    """`decode_gated_delta_rule` as a kernel: one program a (value block, value head, sequence)."""
    batch, (heads, _, value_dim) = qkv.shape[0], pool.shape[2:]
    tuning = tuning or DecodeTuning.default(batch, heads)
    width = dividing_block(value_dim, tuning.value_block)
    tuning = DecodeTuning(width, tuning.warps, tuning.evict_first)
    call = triton_call(
        functools.partial(_kernel, activation=activation, tuning=tuning),
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
