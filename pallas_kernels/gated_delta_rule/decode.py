"""One token for each of N sequences: an elementwise kernel over the states, in place."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import barrier, dividing_block, power_of_two_blocks, triton_call
from .inputs import Activation, Gates
from .reference import L2_EPS


@dataclass(frozen=True)
class DecodeTuning:
    value_block: int = 32
    warps: int = 4
    blocks: int = 1  # value blocks of a program, each read while the one before is worked on
    order: str = "old"
    loads: str | None = None
    stores: str | None = None
    evict_first: bool = False  # of cached lines: states are read once a step and fill the cache

    @classmethod
    def default(cls, batch: int, heads: int) -> DecodeTuning:
        """Few programs: small blocks, to spread one state over many multiprocessors."""
        if batch * heads <= 128:
            return cls(value_block=16, warps=2)
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
    group_of_blocks, head, row = (pl.program_id(axis) for axis in range(3))
    (heads, key_dim, value_dim), width = pool_ref.shape[2:], tuning.value_block
    group = heads // qkv_ref.shape[1]
    key_head = head // group
    slot, layer = slot_ref[row], layer_ref[0]
    keys = [pl.ds(*cut) for cut in power_of_two_blocks(key_dim)]
    firsts = [(group_of_blocks * tuning.blocks + n) * width for n in range(tuning.blocks)]

    def read(first: Any, size: int) -> Array:
        return qkv_ref[row, key_head, pl.ds(first, size)]

    def state(first: Any) -> list[Array]:
        at = (slot, layer, head)
        cells = [pool_ref.at[(*at, part, pl.ds(first, width))] for part in keys]
        return [plt.load(cell, eviction_policy=tuning.loads) for cell in cells]

    def inputs() -> Any:
        raw = [
            [read(offset + start, size) for offset, size in power_of_two_blocks(key_dim)]
            for start in (0, key_dim)
        ]
        values = 2 * key_dim + (head % group) * value_dim
        v = [read(values + first, width) for first in firsts]
        logit, rate = beta_ref[row, head], rate_ref[head]
        if len(z_ref.shape) == 3:
            z = [(z_ref[row, head, part], bias_ref[head, part]) for part in keys]
        else:
            z = [(z_ref[row, head], bias_ref[head])]
        return raw, v, logit, rate, z

    early = inputs() if tuning.order in ("early", "split") else None
    if tuning.order == "split":
        barrier(interpret)

    def finish(ahead: Any, raw: Any, v: Any, logit: Any, rate: Any, z: Any) -> None:
        q, k = ([x.astype(jnp.float32) for x in parts] for parts in raw)
        q_scale = jax.lax.rsqrt(_sum(x * x for x in q) + L2_EPS) * key_dim**-0.5
        k_scale = jax.lax.rsqrt(_sum(x * x for x in k) + L2_EPS)
        unit = [x * k_scale for x in k]
        both = _sum(x * y for x, y in zip(q, unit, strict=True))
        beta = activation.strength(logit.astype(jnp.float32))
        g = [activation.log_decay(x.astype(jnp.float32), rate, bias) for x, bias in z]
        decay = [jnp.exp(x)[:, None] if x.ndim else jnp.exp(x) for x in g]
        decay = decay if len(decay) == len(keys) else decay * len(keys)
        for n, first in enumerate(firsts):
            states = [s.astype(jnp.float32) * d for s, d in zip(ahead, decay, strict=True)]
            if n + 1 < len(firsts):
                ahead = state(firsts[n + 1])
            # S'^T q + (k . q) b u: both reductions over the state wait for nothing but the state.
            known = sum(jnp.sum(s * x[:, None], axis=0) for s, x in zip(states, unit, strict=True))
            asked = sum(jnp.sum(s * x[:, None], axis=0) for s, x in zip(states, q, strict=True))
            new = beta * (v[n].astype(jnp.float32) - known)
            o = q_scale * (asked + new * both)
            o_ref[row, head, pl.ds(first, width)] = o.astype(o_ref.dtype)
            for part, s, x in zip(keys, states, unit, strict=True):
                plt.store(
                    new_pool_ref.at[slot, layer, head, part, pl.ds(first, width)],
                    (s + x[:, None] * new[None, :]).astype(new_pool_ref.dtype),
                    eviction_policy=tuning.stores,
                )

    @pl.when(slot < 0)
    def _() -> None:  # padding: leave nothing uninitialised behind
        for first in firsts:
            o_ref[row, head, pl.ds(first, width)] = jnp.zeros((width,), o_ref.dtype)

    @pl.when(slot >= 0)
    def _() -> None:
        got = inputs() if tuning.order in ("old", "inputs") else early
        if tuning.order == "inputs":
            barrier(interpret)
        ahead = state(firsts[0])
        if tuning.order not in ("old", "early"):
            barrier(interpret)
        got = inputs() if got is None else got
        if tuning.order == "block":
            barrier(interpret)
        if tuning.order in ("old", "early", "late"):
            finish(ahead, *got)
        else:
            pl.when(layer >= 0)(functools.partial(finish, ahead, *got))


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
    """`decode_gated_delta_rule` as a kernel: a program for each (value blocks, head, sequence)."""
    batch, (heads, _, value_dim) = qkv.shape[0], pool.shape[2:]
    tuning = tuning or DecodeTuning.default(batch, heads)
    width = dividing_block(value_dim, tuning.value_block)
    blocks = math.gcd(value_dim // width, tuning.blocks)
    tuning = replace(tuning, value_block=width, blocks=blocks)
    call = triton_call(
        functools.partial(_kernel, activation=activation, tuning=tuning, interpret=interpret),
        "gated_delta_rule_decode",
        (value_dim // (width * blocks), heads, batch),
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
