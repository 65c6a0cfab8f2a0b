"""Parameter specifications: a tree of ParamSpec beside every tree of parameters.

From one spec follow the shape, the sharding, the byte count and the random initialisation of a
parameter; nothing is allocated to know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .sharding import named_sharding, partition_spec

# A named initialiser, or a hashable function of a key, the shape and the index of the spec.
Init = (
    Literal["normal", "zeros", "ones", "decay_scale", "decay_bias"]
    | Callable[[jax.Array, tuple[int, ...], jax.Array], jax.Array]
)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter. `dtype` None is the model's dtype; `fan_in` scales a normal init.

    `index` tells an `init` function which of the layers of a kind it fills.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init = "normal"
    fan_in: int = 1
    dtype: Any = None
    index: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes: expected one name per axis of {self.shape}, got {self.axes}")

    def dtype_in(self, model_dtype: Any) -> Any:
        return jnp.dtype(self.dtype if self.dtype is not None else model_dtype)


def weight(*axes: tuple[int, str | None], fan_in: int) -> ParamSpec:
    """A matrix of the model's dtype, given as (size, logical axis) pairs."""
    return ParamSpec(tuple(n for n, _ in axes), tuple(a for _, a in axes), fan_in=fan_in)


def scale(size: int, axis: str | None = None) -> ParamSpec:
    """A norm's multiplier, kept in float32 (zero-centred weights are stored as 1 + w)."""
    return ParamSpec((size,), (axis,), init="ones", dtype=jnp.float32)


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def map_specs(fn: Callable[[ParamSpec], Any], specs: Any) -> Any:
    return jax.tree.map(fn, specs, is_leaf=is_spec)


def shapes(specs: Any, model_dtype: Any, mesh: Mesh | None = None) -> Any:
    """ShapeDtypeStructs of a spec tree, with shardings when a mesh is given."""

    def one(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(mesh, spec.axes) if mesh is not None else None
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype_in(model_dtype), sharding=sharding)

    return map_specs(one, specs)


def shardings(specs: Any, mesh: Mesh) -> Any:
    return map_specs(lambda spec: named_sharding(mesh, spec.axes), specs)


def partition_specs(specs: Any) -> Any:
    return map_specs(lambda spec: partition_spec(spec.axes), specs)


def count_params(specs: Any) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def count_bytes(specs: Any, model_dtype: Any) -> int:
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(math.prod(s.shape) * s.dtype_in(model_dtype).itemsize for s in leaves)


def init_params(
    specs: Any,
    key: jax.Array,
    model_dtype: Any,
    mesh: Mesh,
    wanted: Callable[[ParamSpec], bool] = lambda spec: True,
) -> Any:
    """Random parameters, made on the devices that hold them: no host copy, no gathered copy.

    Those that are not `wanted` are None; the others are as they are beside them.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(key, len(leaves))
    made: dict[tuple[ParamSpec, Any], Callable[..., jax.Array]] = {}
    out: list[jax.Array | None] = []
    for leaf, leaf_key in zip(leaves, keys, strict=True):
        if not wanted(leaf):
            out.append(None)
            continue
        kind, dtype = replace(leaf, index=0), leaf.dtype_in(model_dtype)
        if (kind, dtype) not in made:  # equal layers share one compiled initialiser
            fn = jax.jit(
                lambda k, i, s=kind, d=dtype: _init_one(s, k, i, d),
                out_shardings=named_sharding(mesh, leaf.axes),
            )
            made[kind, dtype] = fn
        out.append(made[kind, dtype](leaf_key, jnp.int32(leaf.index)))
    return jax.tree.unflatten(treedef, out)


def _init_one(spec: ParamSpec, key: jax.Array, index: jax.Array, dtype: Any) -> jax.Array:
    match spec.init:
        case "zeros":
            return jnp.zeros(spec.shape, dtype)
        case "ones":
            return jnp.ones(spec.shape, dtype)
        case "normal":
            std = spec.fan_in**-0.5
            return (std * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)
        case "decay_scale":  # A_log = 0: the bias alone sets the horizon
            return jnp.zeros(spec.shape, dtype)
        case "decay_bias":
            # softplus(dt_bias) log-uniform, so that horizons ln(1e-3)/g run from 4 to 4,096 tokens
            low, high = math.log(6.9078 / 4096), math.log(6.9078 / 4)
            rate = jnp.exp(jax.random.uniform(key, spec.shape, jnp.float32, low, high))
            return jnp.log(jnp.expm1(rate)).astype(dtype)
        case init:
            return init(key, spec.shape, index).astype(dtype)
