"""One table from logical axis to mesh axis, the mesh, and functions over it.

The forward pass runs inside one `shard_map` over the axis `tp`: layers see their local heads,
derive every count from the shapes of their parameters, and reduce explicitly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "tp"
REPLICATED = PartitionSpec()

# Logical axes that are cut over `tp`; every other axis is whole on every rank.
SHARDED_AXES = frozenset({"vocab", "heads", "kv_heads", "key_heads", "value_heads", "ffn"})


def make_mesh(tp: int = 1, devices: list[Any] | None = None) -> Mesh:
    """A one-axis mesh of the first `tp` devices. ValueError when there are too few."""
    devices = devices if devices is not None else jax.devices()
    if tp > len(devices):
        raise ValueError(f"tp: expected at most {len(devices)} (the devices here), got {tp}")
    return Mesh(np.array(devices[:tp]), (AXIS,))


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec of an array whose axes have these logical names."""
    return PartitionSpec(*(AXIS if axis in SHARDED_AXES else None for axis in axes))


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))


def sharded(
    fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`fn` over local shards. Collectives make its unsharded results equal on every rank."""
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
