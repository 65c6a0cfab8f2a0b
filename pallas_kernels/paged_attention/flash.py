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
from typing import Any, NamedTuple

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

WIDEST_ROWS = 128  # of one matrix of queries

Sums = tuple[Array, Array, tuple[Array, ...]]  # top, total, acc


class _Queries(NamedTuple):
    """Rows of a program that are one matrix."""

    token: Array  # in the tile
    head: Array
    valid: Array
    packed: Array  # the token's index in the batch
    position: Array
    q: list[Array]


@dataclass(frozen=True)
class Heads:
    """Query heads of one kv head, `together` of them in a program."""

    group: int
    together: int
    kv_heads: int

    @property
    def blocks(self) -> int:
        return self.kv_heads * -(-self.group // self.together)


def head_blocks(q_heads: int, kv_heads: int, rows: int, tokens: int) -> Heads:
    """`tokens` come in tiles of `rows // together`, and a group in blocks of `together`: as many
    together as take about the fewest programs, whose rows are then seldom empty. (More together
    is better for short sequences side by side: each has tiles of its own.)"""
    group = q_heads // kv_heads

    def programs(together: int) -> int:
        return -(-tokens // (rows // together)) * -(-group // together)

    numbers = range(min(group, rows), 0, -1)
    fewest = min(map(programs, numbers))
    return Heads(group, next(n for n in numbers if 8 * programs(n) <= 9 * fewest), kv_heads)


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


def _weigh(
    scores: Array, sums: Sums, factor: float, slack: float, interpret: bool
) -> tuple[Sums, Array]:
    """A block's weights, and the sums to which its values, weighed, are to be added."""
    top, total, acc = sums
    # The largest so far need not be the reference, only near: sums are seldom scaled down.
    high = jnp.max(scores, axis=1) * factor
    high = jnp.where(high > top + slack, high, top)
    weights = _powers(scores, factor, high, interpret)

    def shrunk() -> tuple[Array, tuple[Array, ...]]:
        shrink = jnp.exp2(top - high)
        return total * shrink, tuple(a * shrink[:, None] for a in acc)

    if slack:
        total, acc = lax.cond(jnp.max(high - top) > 0, shrunk, lambda: (total, acc))
    else:
        total, acc = shrunk()
    return (high, total + jnp.sum(weights, axis=1), acc), weights


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
    row_groups = power_of_two_blocks(tuning.rows, WIDEST_ROWS)

    def queries(offset: int, size: int, start: Array, tokens: Any) -> _Queries:
        row = offset + iota((size,), 0)
        token, in_block = row // heads.together, row % heads.together
        valid = (token < tokens) & (in_group + in_block < heads.group)
        head, packed = kv_head * heads.group + in_group + in_block, start + token
        position = plt.load(positions_ref.at[packed], mask=valid, other=-1)
        where = packed[:, None], head[:, None]
        q = [
            plt.load(q_ref.at[(*where, columns(part))], mask=valid[:, None], other=0)
            for part in key_parts
        ]
        return _Queries(token, head, valid, packed, position, q)

    def piece(index: Array) -> None:
        tile_ref, first_ref, end_ref = piece_refs
        tile, first, end = tile_ref[index], first_ref[index], end_ref[index]
        start, tokens, sequence = tile, 1, tile
        if queries_refs is not None:
            start, tokens, sequence = (ref[tile] for ref in queries_refs)
        groups = [queries(*rows, start, tokens) for rows in row_groups]

        def keys_of(index: Array) -> Array:
            return first + index * tuning.block + iota((tuning.block,), 0)

        def pages_of(index: Array) -> Array:
            """Behind the last key anything may stand in the table: it is not read there."""
            at = keys_of(index)
            found = plt.load(table_ref.at[sequence, at // page_size], mask=at < end, other=0)
            return jnp.maximum(found, 0)

        def visit(index: Array, carry: Any, masked: bool) -> Any:
            """The pages of a block are looked up during the block before: a load that waits for
            another is not overlapped with the products."""
            sums, pages = carry
            at = keys_of(index)
            inside = at < end
            page, offset = pages[:, None], (at % page_size)[:, None]
            pages = pages_of(index + 1)

            def load(ref: Any, part: tuple[int, int]) -> Array:
                where = ref.at[page, layer, offset, kv_head, columns(part)]
                return plt.load(where, mask=inside[:, None], other=0) if masked else plt.load(where)

            k = [load(keys_ref, part) for part in key_parts]

            def values() -> list[Array]:
                if latents:
                    return k[: len(value_parts)]
                return [load(values_ref, part) for part in value_parts]

            weighed = []
            for group, before in zip(groups, sums, strict=True):
                scores: Any = sum(dot(x, y, tb=True) for x, y in zip(group.q, k, strict=True))
                if masked:
                    visible = (at[None, :] <= group.position[:, None]) & inside[None, :]
                    scores = jnp.where(visible, scores, NEVER / factor)
                weighed.append(_weigh(scores, before, factor, tuning.slack, dot.interpret))
            v = values()
            sums = tuple(
                (
                    top,
                    total,
                    tuple(a + dot(w.astype(x.dtype), x) for a, x in zip(acc, v, strict=True)),
                )
                for (top, total, acc), w in weighed
            )
            return sums, pages

        sums = tuple(
            (
                jnp.full((size,), LOWEST, jnp.float32),
                jnp.zeros((size,), jnp.float32),
                tuple(jnp.zeros((size, width), jnp.float32) for _, width in value_parts),
            )
            for _, size in row_groups
        )
        # Blocks that every query sees whole come first and need no mask.
        nearest = (jnp.min(jnp.where(x.valid, x.position, end)) for x in groups)
        everyone = functools.reduce(jnp.minimum, nearest) + 1
        seen = jnp.maximum(jnp.minimum(everyone, end) - first, 0) // tuning.block
        blocks = (jnp.maximum(end - first, 0) + tuning.block - 1) // tuning.block
        carry = sums, pages_of(jnp.int32(0))
        carry = lax.fori_loop(0, seen, functools.partial(visit, masked=False), carry)
        carry = lax.fori_loop(seen, blocks, functools.partial(visit, masked=True), carry)
        for group, found in zip(groups, carry[0], strict=True):
            store(index, group, found)

    def store(index: Array, group: _Queries, found: Sums) -> None:
        (top, total, acc), rows = found, group.valid[:, None]
        if whole:
            (o_ref,) = out_refs
            share = 1 / jnp.where(total > 0, total, 1)
            for part, a in zip(value_parts, acc, strict=True):
                where = o_ref.at[group.packed[:, None], group.head[:, None], columns(part)]
                plt.store(where, (a * share[:, None]).astype(o_ref.dtype), mask=rows)
            return
        acc_ref, top_ref, total_ref = out_refs
        at = index, group.token, group.head
        plt.store(top_ref.at[at], top, mask=group.valid)
        plt.store(total_ref.at[at], total, mask=group.valid)
        for part, a in zip(value_parts, acc, strict=True):
            where = acc_ref.at[index, group.token[:, None], group.head[:, None], columns(part)]
            plt.store(where, a, mask=rows)

    worker, workers = pl.program_id(1), pl.num_programs(1)
    mine = (count_ref[0] - worker + workers - 1) // workers

    def one(step: Array, carry: None) -> None:
        piece(worker + step * workers)

    lax.fori_loop(0, mine, one, None)
