"""One launch a layer: a program takes a query head of a token, or a kv head and its slot.

XLA makes six of it, and passes queries through memory in float32 between them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..triton import power_of_two_blocks, triton_call
from .reference import Norms, angles


def supported(k: Array, values: Array, rotary_dim: int) -> bool:
    half = rotary_dim // 2
    fits = half & (half - 1) == 0 and max(k.shape[-1], values.shape[-1]) <= 512
    return fits and k.shape[0] > 0


def _kernel(
    keys_ref: Any, values_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, scale_refs: Any,
    angle_refs: Any, slot_ref: Any, layer_ref: Any, new_keys_ref: Any, new_values_ref: Any,
    *o_refs: Any, half: int, eps: float,
) -> None:  # fmt: skip
    del keys_ref, values_ref  # only written to
    q_heads, size = sum(ref.shape[1] for ref in o_refs), new_keys_ref.shape[2]
    heads = q_heads + k_ref.shape[1]
    token, program = pl.program_id(0) // heads, pl.program_id(0) % heads
    slot, layer = slot_ref[token], layer_ref[0]
    dim, width = k_ref.shape[2], v_ref.shape[2]
    rest = [(2 * half + at, size) for at, size in power_of_two_blocks(dim - 2 * half, 256)]
    parts = [pl.ds(*part) for part in ([(0, half), (half, half)] if half else []) + rest]

    def turned(x: list[Array], scale_ref: Any) -> list[Array]:
        x = [y.astype(jnp.float32) for y in x]
        if scale_ref is not None:
            total = functools.reduce(jnp.add, [jnp.sum(y * y) for y in x])
            scale = lax.rsqrt(total / dim + eps)
            x = [y * scale * scale_ref[part] for y, part in zip(x, parts, strict=True)]
        if half:
            cos, sin = (ref[token, :] for ref in angle_refs)
            x[:2] = x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin
        return x

    for o_ref in o_refs:  # one, or none

        @pl.when(program < q_heads)
        def _(o_ref: Any = o_ref) -> None:
            x = turned([q_ref[token, program, 0, part] for part in parts], scale_refs[0])
            for part, y in zip(parts, x, strict=True):
                o_ref[token, program, part] = y.astype(o_ref.dtype)

    @pl.when((program >= q_heads) & (slot >= 0))
    def _() -> None:
        head = program - q_heads
        at = (slot // size, layer, slot % size, head)
        x = turned([k_ref[token, head, part] for part in parts], scale_refs[1])
        for part, y in zip(parts, x, strict=True):
            new_keys_ref[*at, part] = y.astype(new_keys_ref.dtype)
        for part in (pl.ds(*cut) for cut in power_of_two_blocks(width, 256)):
            new_values_ref[*at, part] = v_ref[token, head, part].astype(new_values_ref.dtype)


def rotate_and_write(
    q: Array | None,
    k: Array,
    v: Array,
    norms: Norms | None,
    eps: float,
    positions: Array,
    rotary_dim: int,
    theta: float,
    keys: Array,
    values: Array,
    layer: int | Array,
    kv_slots: Array,
    *,
    interpret: bool = False,
) -> tuple[Array | None, Array, Array]:
    tokens, kv_heads, dim = k.shape
    heads = 0 if q is None else q.shape[1]
    scales = (None, None) if norms is None else tuple(w.astype(jnp.float32) for w in norms)
    turns = angles(positions, rotary_dim, theta) if rotary_dim else None
    call = triton_call(
        functools.partial(_kernel, half=rotary_dim // 2, eps=eps),
        "rotate_and_write",
        (tokens * (heads + kv_heads),),
        (
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            *(() if q is None else (jax.ShapeDtypeStruct((tokens, heads, dim), q.dtype),)),
        ),
        warps=1,
        aliases={0: 0, 1: 1},
        interpret=interpret,
    )
    at = jnp.asarray([layer], jnp.int32)
    keys, values, *turned = call(keys, values, q, k, v, scales, turns, kv_slots, at)
    return turned[0] if turned else None, keys, values
