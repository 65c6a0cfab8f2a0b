"""Flash attention over paged keys and values: one kernel for decode and prefill, GQA and latents.

A program takes a piece of work (work.py): the queries of a tile, of all heads that share a kv head,
as the rows of one matrix, against a range of keys that it visits block by block with a running
softmax. Where tiles are cut into several pieces, each leaves

    top = max_s x_s,   total = sum_s 2^(x_s - top),   acc = sum_s 2^(x_s - top) v_s

with x_s = q k_s log2(e), and attend.py merges them.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import Dot, iota, power_of_two_blocks
from .tuning import Tuning

# The logit of a key that is not visible, and the reference of a row that has seen none. Finite, and
# one far below the other: such a row's weights are zeros, and no difference of equals is rounded.
NEVER, LOWEST = -1e34, -1e30
WIDEST = 256  # block of a head dim

Sums = tuple[Array, Array, tuple[Array, ...]]  # top, total, acc


@dataclass(frozen=True)
class Heads:
    """Query heads of one kv head, `together` of them in a program."""

    group: int
    together: int
    kv_heads: int

    @property
    def blocks(self) -> int:
        return self.kv_heads * -(-self.group // self.together)


def head_blocks(q_heads: int, kv_heads: int, rows: int) -> Heads:
    group = q_heads // kv_heads
    return Heads(group, min(group, rows), kv_heads)


def parts_of(dim: int, value_dim: int | None = None) -> tuple[tuple[int, int], ...]:
    """Power-of-two blocks of a head dim, cut at `value_dim` where keys serve as values."""
    cut = value_dim or dim
    rest = power_of_two_blocks(dim - cut, WIDEST)
    return (*power_of_two_blocks(cut, WIDEST), *((cut + at, width) for at, width in rest))


def columns(part: tuple[int, int]) -> Array:
    return part[0] + iota((1, part[1]), 1)


def _powers(scores: Array, factor: float, high: Array, interpret: bool) -> Array:
    """2^(factor scores - high) in two instructions an element. (Triton's exp2 takes five, to be
    right for results below 1e-38.)"""
    shape = scores.shape
    if interpret:
        return jnp.exp2(scores * factor - high[:, None])
    literal = struct.pack(">f", factor).hex()
    asm = f"{{ .reg .f32 x; fma.rn.ftz.f32 x, $1, 0f{literal}, $2; ex2.approx.ftz.f32 $0, x; }}"
    return plt.elementwise_inline_asm(
        asm,
        args=(scores, jnp.broadcast_to(-high[:, None], shape)),
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=(jax.ShapeDtypeStruct(shape, jnp.float32),),
    )[0]


def kernel(
    layer_ref: Any,
    count_ref: Any,
    piece_refs: Any,
    queries_refs: Any,
    positions_ref: Any,
    table_ref: Any,
    q_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    *out_refs: Any,
    heads: Heads,
    scale: float,
    value_dim: int,
    whole: bool,
    tuning: Tuning,
    dot: Dot,
) -> None:
    page_size, dim = keys_ref.shape[2], keys_ref.shape[4]
    latents = values_ref is None
    key_parts = parts_of(dim, value_dim if latents else None)
    value_parts = parts_of(value_dim)
    blocks_of_group = heads.blocks // heads.kv_heads
    kv_head = pl.program_id(0) // blocks_of_group
    in_group = (pl.program_id(0) % blocks_of_group) * heads.together
    layer, factor = layer_ref[0], scale * math.log2(math.e)
    row = iota((tuning.rows,), 0)
    row_token, row_head = row // heads.together, in_group + row % heads.together
    head = kv_head * heads.group + row_head

    def piece(index: Array) -> None:
        tile_ref, first_ref, end_ref = piece_refs
        tile, first, end = tile_ref[index], first_ref[index], end_ref[index]
        start, tokens, sequence = tile, 1, tile
        if queries_refs is not None:
            start, tokens, sequence = (ref[tile] for ref in queries_refs)
        valid = (row_token < tokens) & (row_head < heads.group)
        token = start + row_token
        position = plt.load(positions_ref.at[token], mask=valid, other=-1)
        rows = valid[:, None]
        q = [
            plt.load(q_ref.at[token[:, None], head[:, None], columns(part)], mask=rows, other=0)
            for part in key_parts
        ]

        def keys_of(index: Array) -> Array:
            return first + index * tuning.block + iota((tuning.block,), 0)

        def pages_of(index: Array) -> Array:
            """Behind the last key anything may stand in the table: it is not read there."""
            at = keys_of(index)
            found = plt.load(table_ref.at[sequence, at // page_size], mask=at < end, other=0)
            return jnp.maximum(found, 0)

        def visit(index: Array, carry: tuple[Sums, Array], masked: bool) -> tuple[Sums, Array]:
            """The pages of a block are looked up during the block before: a load that waits for
            another is not overlapped with the products."""
            (top, total, acc), pages = carry
            at = keys_of(index)
            inside = at < end
            page, offset = pages[:, None], (at % page_size)[:, None]
            pages = pages_of(index + 1)

            def load(ref: Any, part: tuple[int, int]) -> Array:
                where = ref.at[page, layer, offset, kv_head, columns(part)]
                return plt.load(where, mask=inside[:, None], other=0) if masked else plt.load(where)

            k = [load(keys_ref, part) for part in key_parts]
            scores: Any = sum(dot(x, y, tb=True) for x, y in zip(q, k, strict=True))
            if masked:
                visible = (at[None, :] <= position[:, None]) & inside[None, :]
                scores = jnp.where(visible, scores, NEVER / factor)
            # The largest so far need not be the reference, only near: sums are seldom scaled down.
            high = jnp.max(scores, axis=1) * factor
            high = jnp.where(high > top + tuning.slack, high, top)
            weights = _powers(scores, factor, high, dot.interpret)

            def shrunk() -> tuple[Array, tuple[Array, ...]]:
                shrink = jnp.exp2(top - high)
                return total * shrink, tuple(a * shrink[:, None] for a in acc)

            if tuning.slack:
                total, acc = lax.cond(jnp.max(high - top) > 0, shrunk, lambda: (total, acc))
            else:
                total, acc = shrunk()
            total = total + jnp.sum(weights, axis=1)
            v = k[: len(value_parts)] if latents else [load(values_ref, p) for p in value_parts]
            weights = weights.astype(v[0].dtype)
            acc = tuple(a + dot(weights, x) for a, x in zip(acc, v, strict=True))
            return (high, total, acc), pages

        sums = (
            jnp.full((tuning.rows,), LOWEST, jnp.float32),
            jnp.zeros((tuning.rows,), jnp.float32),
            tuple(jnp.zeros((tuning.rows, width), jnp.float32) for _, width in value_parts),
        )
        # Blocks that every query sees whole come first and need no mask.
        everyone = jnp.min(jnp.where(valid, position, end)) + 1
        seen = jnp.maximum(jnp.minimum(everyone, end) - first, 0) // tuning.block
        blocks = (jnp.maximum(end - first, 0) + tuning.block - 1) // tuning.block
        carry = sums, pages_of(jnp.int32(0))
        carry = lax.fori_loop(0, seen, functools.partial(visit, masked=False), carry)
        carry = lax.fori_loop(seen, blocks, functools.partial(visit, masked=True), carry)
        top, total, acc = carry[0]

        if whole:
            (o_ref,) = out_refs
            share = 1 / jnp.where(total > 0, total, 1)
            for part, a in zip(value_parts, acc, strict=True):
                where = o_ref.at[token[:, None], head[:, None], columns(part)]
                plt.store(where, (a * share[:, None]).astype(o_ref.dtype), mask=rows)
            return
        acc_ref, top_ref, total_ref = out_refs
        plt.store(top_ref.at[index, row_token, head], top, mask=valid)
        plt.store(total_ref.at[index, row_token, head], total, mask=valid)
        for part, a in zip(value_parts, acc, strict=True):
            where = acc_ref.at[index, row_token[:, None], head[:, None], columns(part)]
            plt.store(where, a, mask=rows)

    worker, workers = pl.program_id(1), pl.num_programs(1)
    mine = (count_ref[0] - worker + workers - 1) // workers

    def one(step: Array, carry: None) -> None:
        piece(worker + step * workers)

    lax.fori_loop(0, mine, one, None)
