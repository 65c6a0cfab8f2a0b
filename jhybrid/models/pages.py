"""Moves of whole pages of the caches: keys, values and group inputs, all layers at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from pallas_kernels.ragged import or_outside

from ..batch import Caches

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
