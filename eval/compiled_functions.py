"""The kernels at sizes of published models: functions to compile, with their abstract arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jhybrid.layers.mlp import activation_of
from pallas_kernels import Product, Window, causal_conv1d, ragged_pack, skinny_matmuls, tiled_matmul
from pallas_kernels.arg_specs import (
    ATTENTION_SHAPES,
    HEAD_SHAPES,
    AttentionShape,
    HeadShape,
    segments_shape,
)
from pallas_kernels.gated_delta_rule.decode import decode
from pallas_kernels.gated_delta_rule.inputs import SOFTPLUS
from pallas_kernels.gated_delta_rule.prefill import ragged_prefill
from pallas_kernels.gated_delta_rule.short_prefill import MOST_TOKENS, short_prefill
from pallas_kernels.gated_delta_rule.tuning import PrefillTuning
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.paged_attention import api as attention
from pallas_kernels.paged_attention.tuning import FEW, Tuning

TOKENS, SEGMENTS, SLOTS, BATCH = 2048, 4, 9, 32
PAGES, PAGE, CONTEXT = 200_000, 16, 32768  # so many that offsets take 64 bits


def prefill_function(shape: HeadShape, sequences: int = SEGMENTS) -> tuple[Callable, Any]:
    """A prefill of at most so many sequences, and its abstract arguments."""
    layers = jax.ShapeDtypeStruct((SEGMENTS,), jnp.int32)
    avals = (*shape.inputs(TOKENS), shape.pool(SLOTS), layers, segments_shape(SEGMENTS))

    def run(qkv: Any, gates: Any, pool: Any, layers: Any, segments: Any) -> Any:
        gates = gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])
        args = (qkv, gates, pool, layers, None, segments, SOFTPLUS)
        return ragged_prefill(*args, sequences=sequences)

    return run, avals


def prefill_functions(shape: HeadShape) -> Iterator[tuple[Callable, Any]]:
    """Of one sequence and of several, where their kernels differ."""
    columns = shape.heads * shape.value_dim
    different = {
        PrefillTuning.default(jnp.bfloat16, shape.per_channel, n * columns): n
        for n in (1, SEGMENTS)
    }
    for sequences in different.values():
        yield prefill_function(shape, sequences)


def short_prefill_function(shape: HeadShape) -> tuple[Callable, Any]:
    """The prefill of a question, from a hit's state."""
    layers = jax.ShapeDtypeStruct((SEGMENTS,), jnp.int32)
    avals = (*shape.inputs(MOST_TOKENS), shape.pool(SLOTS), layers, segments_shape(SEGMENTS))

    def run(qkv: Any, gates: Any, pool: Any, layers: Any, segments: Any) -> Any:
        gates = gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])
        return short_prefill(qkv, gates, pool, layers, None, segments, SOFTPLUS)

    return run, avals


def decode_function(shape: HeadShape, tuning: Any = None) -> tuple[Callable, Any]:
    slots = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    avals = (*shape.inputs(BATCH), shape.pool(BATCH + 1), slots)

    def run(qkv: Any, gates: Any, pool: Any, slots: Any) -> Any:
        return decode(qkv, gates, pool, 0, slots, SOFTPLUS, tuning=tuning)

    return run, avals


def pack_functions() -> Iterator[tuple[Callable, Any]]:
    """Half of the rows of Kimi-Linear's 20 layers, in float32 and in int8."""
    pool = HEAD_SHAPES["kda-32x32x128"].pool(SLOTS, layers=20)
    kept = 20 * 32 * 128 // 2
    rows, slots = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (kept, 8))
    for dtype in (jnp.float32, jnp.int8):
        values = jax.ShapeDtypeStruct((SLOTS, kept, 128), dtype)
        scales = jax.ShapeDtypeStruct((SLOTS, kept), jnp.float32) if dtype == jnp.int8 else None
        packed: Any = ragged_pack.PackedStates(values, scales)  # pyright: ignore[reportArgumentType]
        yield _in_pallas(ragged_pack.pack_states), (pool, packed, rows, slots, slots)
        for omitted in ("zero", "keep"):
            unpack = _in_pallas(ragged_pack.unpack_states, omitted=omitted)
            yield unpack, (packed, pool, rows, slots, slots)


def conv_functions() -> Iterator[tuple[Callable, Any]]:
    """Qwen3.5-4B and OLMo-Hybrid: the first channels of every key head of a projection."""
    layer, slots = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    for heads, width, beside in ((16, 512, 256), (30, 384, 192)):
        weight = jax.ShapeDtypeStruct((heads, width, 4), jnp.bfloat16)
        pool = jax.ShapeDtypeStruct((SLOTS, 20, 3, heads * width), jnp.bfloat16)
        for op, tokens, last in (
            (causal_conv1d.ragged_causal_conv1d, TOKENS, segments_shape(SEGMENTS)),
            (causal_conv1d.decode_causal_conv1d, BATCH, slots),
        ):
            x = jax.ShapeDtypeStruct((tokens, heads, width + beside), jnp.bfloat16)
            yield _in_pallas(op), (x, weight, pool, layer, last)


def experts_functions() -> Iterator[tuple[Callable, Any]]:
    """Qwen3.5-35B-A3B: 8 of 256 experts, from one token to a whole prefill."""
    sizes = jax.ShapeDtypeStruct((256,), jnp.int32)
    gate_up = jax.ShapeDtypeStruct((256, 2, 512, 2048), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((256, 2048, 512), jnp.bfloat16)

    def first(x: Any, w: Any, sizes: Any, groups: Any, rows: Any, **options: Any) -> Any:
        op = _in_pallas(grouped_matmul, combine=activation_of("silu"), **options)
        return op(x, w, sizes, groups=groups, rows=rows)

    def second(x: Any, w: Any, sizes: Any, groups: Any, **options: Any) -> Any:
        return _in_pallas(grouped_matmul, **options)(x, w, sizes, groups=groups)

    for tokens, aligned in ((1, 1), (512, 1), (2048, 1), (8192, 8)):
        count = 8 * tokens + 256 * (aligned - 1)
        x, h = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, 2048), (count, 512))
        )
        rows = jax.ShapeDtypeStruct((count,), jnp.int32)
        groups = rows if aligned == 1 else None
        options = {"dtype": jnp.bfloat16, "aligned": aligned}
        yield functools.partial(first, **options), (x, gate_up, sizes, groups, rows)
        yield functools.partial(second, **options), (h, down, sizes, groups)


class ProductShapes(NamedTuple):
    """Of a model's decode step; matrices are (groups, outputs) of each product of one launch."""

    hidden: int
    read: tuple[tuple[tuple[int, int], ...], ...]
    convolved: tuple[int, int]  # key heads of the first of them, and channels of each
    combined: int  # outputs of two matrices
    added: tuple[int, ...]  # inner dimensions of what goes to the residual stream


PRODUCT_SHAPES = {
    "Qwen3.5-4B": ProductShapes(
        2560,
        (((1, 12288), (2, 32)), ((1, 8192), (1, 1024), (1, 1024)), ((1, 248320),)),
        (16, 512),
        9216,
        (4096, 9216),
    ),
    "Qwen3.6-27B": ProductShapes(
        5120,
        (((1, 16384), (2, 48)), ((1, 12288), (1, 1024), (1, 1024)), ((1, 248320),)),
        (16, 640),
        17408,
        (6144, 17408),
    ),
    "Qwen3.5-35B-A3B": ProductShapes(
        2048,
        (((1, 12288), (2, 32)), ((1, 8192), (1, 512), (1, 512)), ((1, 248320),)),
        (16, 512),
        512,
        (4096, 512),
    ),
    "Kimi-Linear": ProductShapes(
        2304,
        (((1, 12288), (1, 128), (1, 32)), ((1, 6144),), ((1, 576),), ((1, 163840),)),
        (32, 384),
        9216,
        (4096, 9216, 1024),
    ),
}


def product_functions() -> Iterator[tuple[Callable, Any]]:
    """What a block reads, with gates beside, and with a convolution behind; what it combines; what
    it adds; the vocabulary."""

    def read(x: Any, scale: Any, first: Any, *rest: Any) -> Any:
        products = (Product(first), *(Product(w, dtype=jnp.float32) for w in rest))
        return _in_pallas(skinny_matmuls)(x, products, (scale, 1e-6))

    def convolved(x: Any, scale: Any, window: Any, first: Any, *rest: Any) -> Any:
        products = (Product(first, window=Window(*window)), *map(Product, rest))
        return _in_pallas(skinny_matmuls)(x, products, (scale, 1e-6))

    def gated(x: Any, scale: Any, gate_up: Any) -> Any:
        return _in_pallas(skinny_matmuls)(
            x, (Product(gate_up, activation_of("silu")),), (scale, 1e-6)
        )

    def add(x: Any, w: Any, residual: Any) -> Any:
        return _in_pallas(skinny_matmuls)(x, (Product(w, residual=residual),))

    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    for rows in (1, 2, 8, 16, 24, 32):
        for hidden, launches, (heads, width), combined, added in PRODUCT_SHAPES.values():
            x, scale = bf16((rows, hidden)), jax.ShapeDtypeStruct((hidden,), jnp.float32)
            for matrices in launches:
                yield read, (x, scale, *(bf16((*each, hidden)) for each in matrices))
            pool = bf16((SLOTS, 24, 3, heads * width))
            window = bf16((heads, width, 4)), pool, number(()), number((rows,))
            matrices = (bf16((*each, hidden)) for each in launches[0])
            yield convolved, (x, scale, window, *matrices)
            yield gated, (x, scale, bf16((2, combined, hidden)))
            for inner in added:
                yield add, (bf16((rows, inner)), bf16((1, hidden, inner)), x)


def tiled_functions() -> Iterator[tuple[Callable, Any]]:
    """A prefill of Qwen3.5-4B: gate and up, and a matrix alone."""
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    x, count = bf16((8192, 2560)), jax.ShapeDtypeStruct((), jnp.int32)

    def run(combine: Any, x: Any, w: Any, count: Any) -> Any:
        return _in_pallas(tiled_matmul)(x, w, combine, count)

    yield functools.partial(run, activation_of("silu")), (x, bf16((2, 9216, 2560)), count)
    yield functools.partial(run, None), (x, bf16((1, 12288, 2560)), count)


def _in_pallas(op: Callable, **options: Any) -> Callable:
    return functools.partial(op, implementation="pallas", **options)


OPS = {
    "ragged_pack": pack_functions,
    "causal_conv1d": conv_functions,
    "grouped_matmul": experts_functions,
    "tiled_matmul": tiled_functions,
    "skinny_matmul": product_functions,
}


def attention_prefill_function(
    shape: AttentionShape, tokens: int = TOKENS, tuning: Tuning | None = None
) -> tuple[Callable, Any]:
    cu = jax.ShapeDtypeStruct((SEGMENTS + 1,), jnp.int32)
    return _attention(shape, attention.prefill, tokens, SEGMENTS, (cu,), tuning)


def attention_decode_function(
    shape: AttentionShape, tuning: Tuning | None = None
) -> tuple[Callable, Any]:
    return _attention(shape, attention.decode, BATCH, BATCH, (), tuning)


def _attention(
    shape: AttentionShape,
    op: Callable[..., Any],
    tokens: int,
    sequences: int,
    cu_seqlens: tuple[Any, ...],
    tuning: Tuning | None,
) -> tuple[Callable, Any]:
    positions = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    table = jax.ShapeDtypeStruct((sequences, CONTEXT // PAGE), jnp.int32)
    pages = shape.pages(PAGES, 1, PAGE)

    def run(q: Any, keys: Any, values: Any, *at: Any) -> Any:
        options: Any = {"scale": shape.key_dim**-0.5, "value_dim": shape.value_dim}
        return op(q, keys, values, 0, *at, tuned=tuning, **options)

    return run, (shape.queries(tokens), *pages, positions, *cu_seqlens, table)


NAMES = (*HEAD_SHAPES, *OPS, *ATTENTION_SHAPES)


def functions(name: str) -> Iterator[tuple[Callable, Any]]:
    """Every function with kernels of a shape, and its abstract arguments."""
    if name in OPS:
        yield from OPS[name]()
        return
    if name in HEAD_SHAPES:
        yield from prefill_functions(HEAD_SHAPES[name])
        yield short_prefill_function(HEAD_SHAPES[name])
        yield decode_function(HEAD_SHAPES[name])
    else:
        for tokens in (TOKENS, FEW):
            yield attention_prefill_function(ATTENTION_SHAPES[name], tokens)
        yield attention_decode_function(ATTENTION_SHAPES[name])
