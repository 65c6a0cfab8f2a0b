"""Prefill of a few tokens by one kernel: the recurrence itself, token by token, in float32.

One program per (value block, value head, chain of segments). The kernels of a long prefill take
45 us a layer of Qwen3.6-27B for 32 tokens, of which three launches and a scan's start are most;
a token here is some 300 cycles. So a program is one warp, whose reductions need no barrier, and the
inputs of a token are read while the one before is worked on.
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
from ..triton import dividing_block, power_of_two_blocks, triton_call
from .inputs import Activation, Gates
from .key_blocks import l2_scales, over_keys, sum_all

MOST_TOKENS = 32
VALUE_BLOCK = 8  # of 128 x 8 states a thread of a warp holds 32

Blocks = tuple[Array, ...]  # one array a block of key channels


class _Token(NamedTuple):
    """As it lies in memory."""

    q: Blocks
    k: Blocks
    v: Array
    z: Blocks | Array  # of the decays: a block of channels each (KDA), or one number
    beta: Array


def _kernel(
    layer_ref: Any, set_ref: Any, cu_ref: Any, load_ref: Any, store_ref: Any, end_ref: Any,
    qkv_ref: Any, z_ref: Any, beta_ref: Any, rate_ref: Any, bias_ref: Any, pool_ref: Any,
    o_ref: Any, new_pool_ref: Any, *, activation: Activation, width: int,
) -> None:  # fmt: skip
    block, head, chain = (pl.program_id(axis) for axis in range(3))
    key_dim, value_dim = pool_ref.shape[3:]
    size, group = qkv_ref.shape[0], pool_ref.shape[2] // qkv_ref.shape[1]
    key_head, per_channel = head // group, len(z_ref.shape) == 3
    cuts = power_of_two_blocks(key_dim)
    keys, values = [pl.ds(*cut) for cut in cuts], pl.ds(block * width, width)

    def read(token: Any) -> _Token:
        at = jnp.minimum(token, size - 1)

        def row(first: Any, count: int) -> Array:
            return qkv_ref[at, key_head, pl.ds(first, count)]

        q, k = (tuple(row(start + offset, n) for offset, n in cuts) for start in (0, key_dim))
        v = row(2 * key_dim + (head % group) * value_dim + block * width, width)
        z = tuple(z_ref[at, head, part] for part in keys) if per_channel else z_ref[at, head]
        return _Token(q, k, v, z, beta_ref[at, head])

    def decays(number: Array, token: _Token) -> list[Array]:
        """Factors of the state's blocks."""
        rate = rate_ref[number, head]
        if not isinstance(token.z, tuple):
            z = token.z.astype(jnp.float32)
            return [jnp.exp(activation.log_decay(z, rate, bias_ref[number, head]))] * len(keys)
        biases = [bias_ref[number, head, part] for part in keys]
        logs = (
            activation.log_decay(z.astype(jnp.float32), rate, bias)
            for z, bias in zip(token.z, biases, strict=True)
        )
        return [jnp.exp(g)[:, None] for g in logs]

    def step(segment: Array, index: Array, carry: tuple[Blocks, _Token]) -> Any:
        state, token = carry
        following = read(index + 1)
        q, k = ([x.astype(jnp.float32) for x in parts] for parts in (token.q, token.k))
        q_scale, k_scale = l2_scales(q, k, key_dim)
        unit = [x * k_scale for x in k]
        both = sum_all(x * y for x, y in zip(q, unit, strict=True))
        beta = activation.strength(token.beta.astype(jnp.float32))
        factors = decays(set_ref[segment], token)
        state = tuple(s * d for s, d in zip(state, factors, strict=True))
        # S'^T q + (k . q) b u: both reductions over the state wait for nothing but the state.
        known, asked = over_keys(state, unit), over_keys(state, q)
        new = beta * (token.v.astype(jnp.float32) - known)
        o_ref[index, head, values] = (q_scale * (asked + new * both)).astype(o_ref.dtype)
        state = tuple(s + x[:, None] * new[None, :] for s, x in zip(state, unit, strict=True))
        return state, following

    def run(segment: Array, state: Blocks) -> Blocks:
        begin, end = cu_ref[segment], cu_ref[segment + 1]
        body = functools.partial(step, segment)
        state, _ = lax.fori_loop(begin, end, body, (state, read(begin)))
        slot = store_ref[segment]

        @pl.when(slot >= 0)
        def _() -> None:
            for part, s in zip(keys, state, strict=True):
                at = (slot, layer_ref[segment], head, part, values)
                new_pool_ref[at] = s.astype(new_pool_ref.dtype)

        return state

    first, slot, behind = chain_at(chain, load_ref, end_ref)
    layer = layer_ref[first]
    from_slot = jnp.broadcast_to(slot >= 0, (1, 1))
    state = tuple(
        plt.load(
            pool_ref.at[(jnp.maximum(slot, 0), layer, head, part, values)],
            mask=from_slot,
            other=0.0,
        ).astype(jnp.float32)
        for part in keys
    )
    lax.fori_loop(chain, behind, run, state)

    def clear(token: Array, carry: Array) -> Array:
        o_ref[token, head, values] = jnp.zeros((width,), o_ref.dtype)
        return carry

    # The program of the chain behind the last, which has no segments, leaves no row as it was.
    last = load_ref.shape[0]
    unused = jnp.where(chain == last, cu_ref[last], size)
    lax.fori_loop(unused, jnp.int32(size), clear, jnp.int32(0))


def short_prefill(
    qkv: Array,
    gates: Gates,
    pool: Array,
    layers: Array,
    gate_sets: Array | None,
    segments: Segments,
    activation: Activation,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`prefill.ragged_prefill` for up to MOST_TOKENS tokens."""
    count, (heads, _, value_dim) = segments.load.shape[0], pool.shape[2:]
    width = dividing_block(value_dim, VALUE_BLOCK)
    sets = jnp.zeros_like(layers) if gate_sets is None else gate_sets
    call = triton_call(
        functools.partial(_kernel, activation=activation, width=width),
        "gated_delta_rule_short_prefill",
        (value_dim // width, heads, count + 1),
        (
            jax.ShapeDtypeStruct((qkv.shape[0], heads, value_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        warps=1,
        aliases={11: 1},
        interpret=interpret,
    )
    o, pool = call(
        layers,
        sets,
        segments.cu,
        segments.load,
        segments.store,
        chain_end(segments),
        qkv,
        *(gates.decay, gates.beta, gates.A_log, gates.dt_bias),
        pool,
    )
    return o, pool
