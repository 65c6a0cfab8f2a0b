"""The sequential parts of the dense rule, each with a kernel and a derivative of its own.

    S_{n+1} = d_n S_n + k_n^T (u_n - w_n S_n),  S_0 = 0
    (I + A)^-1 of strictly lower triangular A

The derivative of the recurrence is the same recurrence backwards: with L_n the cotangent of the
state after chunk n,

    L_{n-1} = dS_n + d_n L_n - w_n^T (k_n L_n)

and all other cotangents follow from S_n and L_n without any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from ..triton import Dot, Implementation, dividing_block, triton_call, use_pallas
from . import reference
from .inverse import block_inverse

STATE_WARPS, INVERSE_WARPS = 4, 1
VALUE_BLOCK = 32


def chunk_states(
    w: Float[Array, "B Hk N G C K"],
    k: Float[Array, "B Hk N G C K"],
    u: Float[Array, "B Hk N G C V"],
    decay: Float[Array, "B Hk N G K"],
    precision: lax.Precision = lax.Precision.DEFAULT,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "B Hk N G K V"]:
    """The state before every chunk."""
    pallas = use_pallas(implementation)
    return cast(Array, _states(w, k, u, decay, (precision, pallas, interpret)))


Way = tuple[lax.Precision, bool, bool]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _states(w: Array, k: Array, u: Array, decay: Array, way: Way) -> Array:
    precision, pallas, interpret = way
    if pallas:
        out = k.shape[-1], u.shape[-1]
        return _kernel_call(_forward_kernel, (w, k, u, decay), out, interpret)

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        w, k, u, decay = chunk
        new = u - jnp.matmul(w, state, precision=precision)
        update = jnp.matmul(jnp.swapaxes(k, -1, -2), new, precision=precision)
        return state * decay[..., None] + update, state

    first = jnp.zeros((*u.shape[:2], u.shape[3], k.shape[-1], u.shape[-1]), u.dtype)
    return _over_chunks(step, first, (w, k, u, decay), reverse=False)


def _over_chunks(step: Callable[..., Any], first: Array, xs: Any, *, reverse: bool) -> Array:
    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), xs)
    _, out = lax.scan(step, first, chunks, reverse=reverse)
    return jnp.moveaxis(out, 0, 2)


def _states_forward(w: Array, k: Array, u: Array, decay: Array, way: Way) -> tuple[Array, Any]:
    states = cast(Array, _states(w, k, u, decay, way))
    return states, (w, k, u, decay, states)


def _states_backward(way: Way, kept: Any, cotangent: Array) -> tuple[Array, ...]:
    precision, pallas, interpret = way
    w, k, u, decay, states = kept

    def matmul(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=precision)

    def turned(x: Array) -> Array:
        return jnp.swapaxes(x, -1, -2)

    if pallas:
        after = _kernel_call(
            _backward_kernel, (w, k, cotangent, decay), states.shape[-2:], interpret
        )
    else:

        def step(after: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            w, k, of_state, decay = chunk
            back = matmul(turned(w), matmul(k, after))
            return of_state + after * decay[..., None] - back, after

        first = jnp.zeros_like(states[:, :, 0])
        after = _over_chunks(step, first, (w, k, cotangent, decay), reverse=True)
    of_new = matmul(k, after)
    of_w = -matmul(of_new, turned(states))
    of_k = matmul(u - matmul(w, states), turned(after))
    return of_w, of_k, of_new, jnp.sum(states * after, axis=-1)


_states.defvjp(_states_forward, _states_backward)


def _forward_kernel(w_ref: Any, k_ref: Any, u_ref: Any, decay_ref: Any, out_ref: Any, *,
                    dot: Dot, width: int) -> None:  # fmt: skip
    at, values = _place(k_ref.shape[3], width)

    def step(n: Array, state: Array) -> Array:
        cell = at(n)
        out_ref[(*cell, slice(None), values)] = state
        new = u_ref[(*cell, slice(None), values)] - dot(w_ref[cell], state)
        return state * decay_ref[cell][:, None] + dot(k_ref[cell], new, ta=True)

    zeros = jnp.zeros((k_ref.shape[-1], width), jnp.float32)
    lax.fori_loop(0, k_ref.shape[2], step, zeros)


def _backward_kernel(w_ref: Any, k_ref: Any, cotangent_ref: Any, decay_ref: Any, out_ref: Any, *,
                     dot: Dot, width: int) -> None:  # fmt: skip
    at, values = _place(k_ref.shape[3], width)
    count = k_ref.shape[2]

    def step(n: Array, after: Array) -> Array:
        cell = at(count - 1 - n)
        out_ref[(*cell, slice(None), values)] = after
        back = dot(w_ref[cell], dot(k_ref[cell], after), ta=True)
        of_state = cotangent_ref[(*cell, slice(None), values)]
        return of_state + after * decay_ref[cell][:, None] - back

    zeros = jnp.zeros((k_ref.shape[-1], width), jnp.float32)
    lax.fori_loop(0, count, step, zeros)


def _place(group: int, width: int) -> tuple[Callable[[Any], tuple[Any, ...]], Any]:
    """Where the program's chunk number n lies in the arrays, and its block of values."""
    block, head, row = (pl.program_id(axis) for axis in range(3))
    return (lambda n: (row, head // group, n, head % group)), pl.ds(block * width, width)


def _kernel_call(
    kernel: Callable[..., None], inputs: tuple[Array, ...], out: tuple[int, ...], interpret: bool
) -> Array:
    """A program for each block of values of each head of each row."""
    rows, key_heads, count, group = inputs[0].shape[:4]
    width = dividing_block(out[-1], VALUE_BLOCK)
    call = triton_call(
        functools.partial(kernel, dot=Dot("tf32", interpret), width=width),
        f"gated_delta_rule{kernel.__name__}",
        (out[-1] // width, key_heads * group, rows),
        (jax.ShapeDtypeStruct((rows, key_heads, count, group, *out), jnp.float32),),
        warps=STATE_WARPS,
        interpret=interpret,
    )
    (found,) = call(*inputs)
    return found


def chunk_inverses(
    a: Float[Array, "*N C C"],
    precision: lax.Precision = lax.Precision.DEFAULT,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*N C C"]:
    """(I + a)^-1 of strictly lower triangular chunks, by a kernel or by the reference.

    `precision` is of the derivative's products; the inverse itself is as good as float32 allows.
    """
    way = (precision, use_pallas(implementation), interpret)
    return cast(Array, _inverse(a.reshape(-1, *a.shape[-2:]), way)).reshape(a.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _inverse(a: Array, way: Way) -> Array:
    _, pallas, interpret = way
    if not pallas:
        return reference.unit_lower_inverse(a, lax.Precision.HIGHEST)
    call = triton_call(
        functools.partial(_inverse_kernel, dot=Dot("tf32x3", interpret)),
        "gated_delta_rule_chunk_inverses",
        (a.shape[0],),
        (jax.ShapeDtypeStruct(a.shape, a.dtype),),
        warps=INVERSE_WARPS,
        interpret=interpret,
    )
    (found,) = call(a)
    return found


def _inverse_forward(a: Array, way: Way) -> tuple[Array, Array]:
    inverse = cast(Array, _inverse(a, way))
    return inverse, inverse


def _inverse_backward(way: Way, inverse: Array, cotangent: Array) -> tuple[Array]:
    return (reference.inverse_cotangent(inverse, cotangent, way[0]),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def _inverse_kernel(a_ref: Any, out_ref: Any, *, dot: Dot) -> None:
    out_ref[pl.program_id(0)] = block_inverse(a_ref[pl.program_id(0)], dot)
