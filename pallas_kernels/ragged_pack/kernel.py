"""One kernel moves rows between two pools of slots, quantising or restoring them on the way.

    y[target[b], put[n]] = x[source[b], take[n]]

Packing takes the kept rows and puts them in order; unpacking the other way round; unpacking with
zeros takes by the inverse list, so that programs write whole blocks of a slot. A negative `take`
gives zeros, a negative `put` stores nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..triton import iota, power_of_two_blocks, triton_call
from .reference import Omitted, PackedStates, row_positions


@dataclass(frozen=True)
class PackTuning:
    rows: int = 32  # a program
    warps: int = 4


def _kernel(
    source_ref: Any,
    target_ref: Any,
    *refs: Any,
    count: int,
    rows: int,
    given: tuple[bool, bool],
    quantised: tuple[bool, bool],
) -> None:
    """`given`: which of take and put there are. y comes twice: as it was, and to be written."""
    following, (read_scale, write_scale) = iter(refs), quantised
    take_ref, put_ref = _optional(following, given)
    x_ref, x_scale_ref = _optional(following, (True, read_scale))
    _optional(following, (True, write_scale))
    y_ref, y_scale_ref = _optional(following, (True, write_scale))

    block, entry = pl.program_id(0), pl.program_id(1)
    source, target = source_ref[entry], target_ref[entry]

    @pl.when((source >= 0) & (target >= 0))
    def _() -> None:
        index = block * rows + iota((rows,), 0)
        inside = index < count

        def listed(ref: Any) -> Array:
            if ref is None:
                return jnp.where(inside, index, -1)
            return plt.load(ref.at[pl.ds(block * rows, rows)], mask=inside, other=-1)

        take, put = listed(take_ref), listed(put_ref)
        taken, stored = take >= 0, put >= 0
        take = jnp.maximum(take, 0)
        # Outside of y, each to a place of its own: interpreted, a masked store writes back what
        # was at its index.
        put = jnp.where(stored, put, y_ref.shape[1] + iota((rows,), 0))

        blocks = power_of_two_blocks(y_ref.shape[2])
        columns = [offset + iota((rows, width), 1) for offset, width in blocks]
        parts = [
            plt.load(
                x_ref.at[source, jnp.broadcast_to(take[:, None], c.shape), c],
                mask=jnp.broadcast_to(taken[:, None], c.shape),
                other=jnp.zeros((), x_ref.dtype),
            )
            for c in columns
        ]
        if read_scale:
            scale = plt.load(x_scale_ref.at[source, take], mask=taken, other=0.0)
            parts = [part.astype(jnp.float32) * scale[:, None] for part in parts]
        if write_scale:
            parts, scale = _quantise(parts)
            plt.store(y_scale_ref.at[target, put], scale, mask=stored)
        for part, c in zip(parts, columns, strict=True):
            place = y_ref.at[target, jnp.broadcast_to(put[:, None], c.shape), c]
            plt.store(place, part, mask=jnp.broadcast_to(stored[:, None], c.shape))


def _optional(refs: Iterator[Any], given: tuple[bool, ...]) -> list[Any]:
    return [next(refs) if here else None for here in given]


def _quantise(parts: list[Array]) -> tuple[list[Array], Array]:
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=1) for x in parts))
    scale = largest / 127.0
    unit = jnp.where(scale > 0, scale, 1.0)[:, None]
    return [jnp.floor(x / unit + 0.5).astype(jnp.int8) for x in parts], scale


def _move_rows(
    x: Array,
    x_scales: Array | None,
    y: Array,
    y_scales: Array | None,
    source: Array,
    target: Array,
    take: Array | None,
    put: Array | None,
    name: str,
    tuning: PackTuning | None,
    interpret: bool,
) -> tuple[Array, ...]:
    """(y, y_scales if given); x is [S, N, V], y [D, M, V]."""
    tuning = tuning or PackTuning()
    lists = [index for index in (take, put) if index is not None]
    count = lists[0].shape[0]
    optional = [array for array in (take, put, x, x_scales) if array is not None]
    outputs = [array for array in (y, y_scales) if array is not None]
    first = 2 + len(optional)
    call = triton_call(
        functools.partial(
            _kernel,
            count=count,
            rows=tuning.rows,
            given=(take is not None, put is not None),
            quantised=(x_scales is not None, y_scales is not None),
        ),
        name,
        (pl.cdiv(count, tuning.rows), source.shape[0]),
        tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in outputs),
        warps=tuning.warps,
        aliases={first + n: n for n in range(len(outputs))},
        interpret=interpret,
    )
    return tuple(call(source, target, *optional, *outputs))


def _as_rows(pool: Array) -> Array:
    return pool.reshape(pool.shape[0], -1, pool.shape[-1])


def pack_states(
    pool: Array,
    packed: PackedStates,
    rows: Array,
    source: Array,
    target: Array,
    *,
    tuning: PackTuning | None = None,
    interpret: bool = False,
) -> PackedStates:
    moved = _move_rows(
        _as_rows(pool), None, *packed, source, target, rows, None, "pack_states", tuning, interpret
    )
    return PackedStates(*moved) if len(moved) == 2 else PackedStates(moved[0], None)


def unpack_states(
    packed: PackedStates,
    pool: Array,
    rows: Array,
    source: Array,
    target: Array,
    *,
    omitted: Omitted,
    positions: Array | None = None,
    tuning: PackTuning | None = None,
    interpret: bool = False,
) -> Array:
    flat = _as_rows(pool)
    take, put = None, rows
    if omitted == "zero":
        take = row_positions(rows, flat.shape[1]) if positions is None else positions
        put = None
    (flat,) = _move_rows(
        *packed, flat, None, source, target, take, put, "unpack_states", tuning, interpret
    )
    return flat.reshape(pool.shape)


def supported(packed: PackedStates) -> bool:
    """Offsets into int8 arrays of 2 to 4 GiB would overflow: Pallas widens them above 4 GiB."""
    values = packed.values
    return values.dtype != jnp.int8 or not 2**31 <= values.size <= 2**32
