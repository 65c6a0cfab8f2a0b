"""The head permutation of hybrid placement, applied once to weights and plan (dasc appendix B.1).

A bundle is a key head with its value heads (GDN) or a head (KDA). Every tensor with an axis of key
heads moves by the same order, output columns included, so the layers compute the same function
and need not know.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ..config import LinearAttentionConfig, ModelConfig
from ..models.specs import ModelParams, model_specs
from ..params import ParamSpec, is_spec
from .placement import assign_bundles, bundle_order
from .selection import RetentionPlan


def bundle_costs(plan: RetentionPlan, config: LinearAttentionConfig) -> Int[np.ndarray, "Ll Hk"]:
    """C_lb: the kept units of each key head's value heads."""
    per_head = plan.keep.sum(axis=2)
    return per_head.reshape(len(per_head), config.key_heads, config.group).sum(axis=2)


def head_order(
    plan: RetentionPlan, config: LinearAttentionConfig, tp: int
) -> Int[np.ndarray, "Ll Hk"]:
    """Algorithm (a): for each layer, the key heads in the order that evens out the ranks."""
    return bundle_order(assign_bundles(bundle_costs(plan, config), tp))


def permute_plan(plan: RetentionPlan, order: Int[np.ndarray, "Ll Hk"]) -> RetentionPlan:
    """The same units with the key heads of each layer, and their value heads, in a new order."""
    layers, heads, _ = plan.keep.shape
    group = heads // order.shape[1]
    by_head = (order[:, :, None] * group + np.arange(group)).reshape(layers, heads, 1)
    values = np.take_along_axis(plan.horizons.values, by_head, axis=1)
    keep = np.take_along_axis(plan.keep, by_head, axis=1)
    return replace(plan, keep=keep, horizons=replace(plan.horizons, values=values))


def permute_params(
    params: ModelParams, config: ModelConfig, order: Int[np.ndarray, "Ll Hk"]
) -> ModelParams:
    """Parameters that compute what `params` does with key heads in the order given.

    Sharded parameters stay sharded as they are; the old ones are donated.
    """
    layers = list(params.layers)
    specs = model_specs(config).layers
    for row, number in zip(order, config.linear_layers, strict=True):

        def permuted(spec: ParamSpec, value: Any, row: np.ndarray = row) -> Any:
            if "key_heads" not in spec.axes:
                return value
            return _take(value, row, spec.axes.index("key_heads"), value.sharding)

        mixer = jax.tree.map(permuted, specs[number].mixer, layers[number].mixer, is_leaf=is_spec)
        layers[number] = replace(layers[number], mixer=mixer)
    return replace(params, layers=tuple(layers))


@functools.partial(jax.jit, static_argnames=("axis", "sharding"), donate_argnums=0)
def _take(
    value: jax.Array, order: jax.Array, axis: int, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Compiled once for a shape, not for a layer. The result lies as `value` does."""
    moved = jnp.take(value, order, axis=axis, mode="clip")
    return jax.lax.with_sharding_constraint(moved, sharding)
