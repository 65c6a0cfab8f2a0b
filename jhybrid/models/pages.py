"""Moves of whole pages of the caches: keys, values, group inputs and states.

All layers at once, but for KV from host memory and to it: that of the layers that a prefill runs
first (see `cut`) moves apart from the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Int32

from pallas_kernels.ragged import or_outside

from ..batch import Caches
from .cut import lower_full

PageKind = Literal["lower-kv", "upper-kv", "inputs", "states"]  # a slot is a page of states
KV: tuple[PageKind, ...] = ("lower-kv", "upper-kv")
Pair = tuple[Int32[Array, " B"], Int32[Array, " B"]]  # sources and targets, -1 for none


def copy_pages(caches: Caches, kv: Pair, inputs: Pair) -> Caches:
    """Caches with KV pages and pages of group inputs copied; no page is source and target."""
    keys, values = _copy((caches.keys, caches.values), *kv)
    group_inputs = _copy(caches.group_inputs, *inputs)
    return replace(caches, keys=keys, values=values, group_inputs=group_inputs)


def _copy(pools: Any, source: Array, target: Array) -> Any:
    def one(pages: Array) -> Array:
        at = pages.at[or_outside(target, pages.shape[0])]
        found = pages[jnp.maximum(source, 0)]
        return at.set(found, mode="drop", unique_indices=True)

    return jax.tree.map(one, pools)


def take_pages(caches: Caches, kind: PageKind, pages: Int32[Array, " B"]) -> Any:
    """The pages of one kind; what negative numbers give is never used. Keys and values are one
    array [2, B, ...], since every array is a transfer of its own."""
    layers = _layers(caches, kind)

    def one(pool: Array) -> Array:
        return pool[jnp.maximum(pages, 0), layers]

    rows = jax.tree.map(one, pools(caches, kind))
    return jnp.stack(rows) if _is_pair(caches, kind) else rows


def rows_partition(partition: Caches, kind: PageKind) -> Any:
    """PartitionSpecs of what `take_pages` gives, from those of the caches."""
    specs: Any = pools(partition, kind)
    return PartitionSpec(None, *specs[0]) if _is_pair(partition, kind) else specs


def put_pages(
    caches: Caches, kind: PageKind, rows: list[Any], pages: Int32[Array, "N B"]
) -> Caches:
    """Caches with what each of N calls of `take_pages` gave in pages of the same kind; negative
    ones are dropped."""
    layers = _layers(caches, kind)

    def one(pool: Array, *parts: Array) -> Array:
        for part, to in zip(parts, pages, strict=True):
            at = pool.at[or_outside(to, pool.shape[0]), layers]
            pool = at.set(part, mode="drop", unique_indices=True)
        return pool

    if pages.shape[1] == 1:  # for a single row XLA copies the pool: a second one goes nowhere
        pages = jnp.concatenate([pages, jnp.full_like(pages, -1)], axis=1)
        rows = jax.tree.map(lambda row: jnp.concatenate([row, row]), rows)
    if _is_pair(caches, kind):
        rows = [(row[0], row[1]) for row in rows]
    new = jax.tree.map(one, pools(caches, kind), *rows)
    match kind:
        case "inputs":
            return replace(caches, group_inputs=new)
        case "states":
            return replace(caches, recurrent=new[0], conv=new[1])
        case "lower-kv" | "upper-kv":
            return replace(caches, keys=new[0], values=new[1])


def pools(caches: Any, kind: PageKind) -> Any:
    """The pools that pages of a kind are in (or, of a tree of specs, theirs)."""
    if kind == "inputs":
        return caches.group_inputs
    if kind == "states":
        return caches.recurrent, caches.conv
    return caches.keys, caches.values


def kv_kinds(full_layers: int) -> tuple[PageKind, ...]:
    """Those that so many full-attention layers have."""
    lower = lower_full(full_layers)
    return KV[: 1 + (lower < full_layers)] if full_layers else ()


def _layers(caches: Caches, kind: PageKind) -> slice:
    """Which layers of the pools a page of this kind has."""
    cut = lower_full(caches.keys.shape[1])
    return {"lower-kv": slice(cut), "upper-kv": slice(cut, None)}.get(kind, slice(None))


def _is_pair(caches: Any, kind: PageKind) -> bool:
    """Whether pages of this kind are keys and values, of one shape, and not latents alone."""
    return kind in KV and caches.values is not None
