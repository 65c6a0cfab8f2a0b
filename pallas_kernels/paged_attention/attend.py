"""Launches of attention over pages: the flash kernel, and the kernel that merges pieces."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import Dot, iota, triton_call
from .flash import LOWEST, Sums, columns, head_blocks, kernel, parts_of
from .reference import gated
from .tuning import Cut, Tuning, programs
from .work import Pieces, Tiles

COMBINED = 32  # pieces merged at once


def _combine_kernel(
    of_tile_ref: Any,
    rows_refs: Any,
    gate_ref: Any,
    acc_ref: Any,
    top_ref: Any,
    total_ref: Any,
    o_ref: Any,
) -> None:
    head, token = pl.program_id(0), pl.program_id(1)
    tile, row = token, 0
    if rows_refs is not None:
        of_token_ref, start_ref = rows_refs
        tile = of_token_ref[token]
        row = token - start_ref[tile]
    first, end = of_tile_ref[tile], of_tile_ref[tile + 1]
    parts = parts_of(o_ref.shape[2])

    def body(index: Array, carry: Sums) -> Sums:
        top, total, acc = carry
        at = first + index * COMBINED + iota((COMBINED,), 0)
        there = at < end
        tops = plt.load(top_ref.at[at, row, head], mask=there, other=LOWEST)
        totals = plt.load(total_ref.at[at, row, head], mask=there, other=0)
        high = jnp.maximum(top, jnp.max(tops))
        weights, shrink = jnp.exp2(tops - high), jnp.exp2(top - high)
        found = [
            plt.load(
                acc_ref.at[at[:, None], row, head, columns(part)], mask=there[:, None], other=0
            )
            for part in parts
        ]
        acc = tuple(
            a * shrink + jnp.sum(x * weights[:, None], axis=0)
            for a, x in zip(acc, found, strict=True)
        )
        return high, total * shrink + jnp.sum(totals * weights), acc

    carry = (
        jnp.float32(LOWEST),
        jnp.float32(0),
        tuple(jnp.zeros((width,), jnp.float32) for _, width in parts),
    )
    groups = (end - first + COMBINED - 1) // COMBINED
    _, total, acc = lax.fori_loop(0, groups, body, carry)
    share = 1 / jnp.where(total > 0, total, 1)
    for (offset, width), a in zip(parts, acc, strict=True):
        y, part = a * share, pl.ds(offset, width)
        if gate_ref is not None:
            y *= jax.nn.sigmoid(gate_ref[token, head, 1, part].astype(jnp.float32))
        o_ref[token, head, part] = y.astype(o_ref.dtype)


def attend(
    q: Array,
    keys: Array,
    values: Array | None,
    layer: int | Array,
    positions: Array,
    page_table: Array,
    tiles: Tiles,
    pieces: Pieces,
    cut: Cut,
    tuning: Tuning,
    *,
    scale: float,
    value_dim: int,
    gates: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Queries q [T, Hq, D] of the tiles against the pages: [T, Hq, V], times the sigmoid of `gates`
    [T, Hq, 2, V], of which the second are meant."""
    tokens, q_heads, _ = q.shape
    heads = head_blocks(q_heads, keys.shape[3], tuning.rows)
    queries = tiles.queries
    per_tile = 1 if queries is None else tuning.rows // heads.together
    dot = Dot("bf16" if q.dtype == jnp.bfloat16 else "tf32x3", interpret)
    out = jax.ShapeDtypeStruct((tokens, q_heads, value_dim), q.dtype)
    rows = (cut.pieces, per_tile, q_heads)
    partial = (
        jax.ShapeDtypeStruct((*rows, value_dim), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )
    inputs = (
        jnp.asarray([layer], jnp.int32),
        pieces.used,
        (pieces.tile, pieces.first, pieces.end),
        None if queries is None else queries[:3],
        positions,
        page_table,
        q,
        keys,
        values,
    )
    static: dict[str, Any] = dict(heads=heads, scale=scale, value_dim=value_dim)
    static |= dict(whole=cut.whole, tuning=tuning, dot=dot)
    run = functools.partial(triton_call, interpret=interpret)
    found = run(
        functools.partial(kernel, **static),
        "paged_attention",
        (heads.blocks, programs(cut, heads.blocks)),
        (out,) if cut.whole else partial,
        warps=tuning.warps,
        stages=tuning.stages,
    )(*inputs)
    if cut.whole:
        return found[0] if gates is None else gated(found[0], gates)
    of_token = None if queries is None else (queries.of_token, queries.start)
    grid = (q_heads, tokens)
    combine = run(_combine_kernel, "paged_attention_combine", grid, (out,), warps=4)
    return combine(pieces.of_tile, of_token, gates, *found)[0]
