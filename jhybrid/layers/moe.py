"""Mixture of experts: a router in float32, experts as one grouped product, a shared expert.

    y = sum_e w_e E_e(x) + sigmoid(x . g) Shared(x)

Kimi-K3's experts work in a latent space: y = U norm(sum_e w_e E_e(L x)) + Shared(x). Experts and
the shared expert are cut over `tp` along their inner width, so every rank routes all tokens to all
experts and the partial sums meet once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int32

from pallas_kernels import grouped_matmul, preferred_alignment
from pallas_kernels.precision import working_dtype

from ..config import Activation, MoEConfig
from ..params import ParamSpec, scale, weight
from ..sharding import AXIS
from .linear import gated_project, project
from .mlp import MLPParams, activation_of, mlp_specs
from .norm import rms_norm


@struct.dataclass
class LatentParams:
    """The space that experts of width L work in."""

    down: Any  # [L, D]
    norm: Any  # [L] float32, or None
    up: Any  # [D, L]


@struct.dataclass
class MoEParams:
    """W is the experts' input and output width: D, or L with a latent space."""

    router: Any  # [E, D]
    bias: Any  # [E] float32: added to sigmoid scores for selection only; None with softmax
    gate_up: Any  # [E, 2, F, W]: gate rows, then up rows
    down: Any  # [E, W, F]
    shared: MLPParams | None
    shared_gate: Any  # [D], or None
    latent: LatentParams | None


def moe_specs(hidden: int, c: MoEConfig) -> MoEParams:
    whole, experts, inner = (hidden, None), (c.experts, None), (c.expert_width, "ffn")
    latent, outer = None, whole
    if c.latent_width is not None:
        outer = (c.latent_width, None)
        latent = LatentParams(
            down=weight(outer, whole, fan_in=hidden),
            norm=scale(c.latent_width) if c.latent_norm else None,
            up=weight(whole, outer, fan_in=c.latent_width),
        )
    bias = ParamSpec((c.experts,), (None,), "zeros", dtype=jnp.float32)
    return MoEParams(
        router=weight(experts, whole, fan_in=hidden),
        bias=bias if c.scoring == "sigmoid" else None,
        gate_up=weight(experts, (2, None), inner, outer, fan_in=outer[0]),
        down=weight(experts, outer, inner, fan_in=c.expert_width),
        shared=mlp_specs(hidden, c.shared_width) if c.shared_width else None,
        shared_gate=weight(whole, fan_in=hidden) if c.shared_gate else None,
        latent=latent,
    )


def moe(
    params: MoEParams, x: Float[Array, "*B D"], config: MoEConfig, activation: Activation
) -> Float[Array, "*B D"]:
    tokens = x.reshape(-1, x.shape[-1])
    weights, experts = route(params, tokens, config)
    latent = params.latent
    inputs = tokens if latent is None else project(tokens, latent.down)
    routed = run_experts(params, inputs, weights, experts, activation)
    shared = shared_expert(params, tokens, activation)
    if latent is None:
        y = lax.psum(routed + shared, AXIS)
    else:  # the norm needs the whole sum over experts and ranks
        routed, shared = lax.psum((routed, shared), AXIS)
        if latent.norm is not None:
            routed = rms_norm(routed, latent.norm, config.norm_eps)
        y = project(routed.astype(x.dtype), latent.up, dtype=shared.dtype) + shared
    return y.astype(x.dtype).reshape(x.shape)


def route(
    params: MoEParams, x: Float[Array, "T D"], c: MoEConfig
) -> tuple[Float[Array, "T K"], Int32[Array, "T K"]]:
    """Weights and indices of each token's experts, from float32 scores."""
    work = working_dtype(x)
    scores = lax.dot_general(
        x.astype(work),
        params.router.astype(work),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    scores = jax.nn.softmax(scores) if c.scoring == "softmax" else jax.nn.sigmoid(scores)
    wanted = scores if params.bias is None else scores + params.bias
    if c.groups > 1:
        wanted = jnp.where(_in_top_groups(wanted, c), wanted, -jnp.inf)
    _, experts = lax.top_k(wanted, c.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if c.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * c.scaling, experts


def _in_top_groups(wanted: Float[Array, "T E"], c: MoEConfig) -> Array:
    """Whether each expert's group is among the top ones by the sum of its two best scores."""
    size = c.experts // c.groups
    best, _ = lax.top_k(wanted.reshape(-1, c.groups, size), min(2, size))
    _, groups = lax.top_k(jnp.sum(best, axis=-1), c.top_groups)
    chosen = jnp.any(jax.nn.one_hot(groups, c.groups, dtype=jnp.bool_), axis=-2)
    return jnp.repeat(chosen, size, axis=-1)


def run_experts(
    params: MoEParams,
    x: Float[Array, "T W"],
    weights: Float[Array, "T K"],
    experts: Int32[Array, "T K"],
    activation: Activation,
) -> Float[Array, "T W"]:
    """This rank's share of sum_e w_e E_e(x), in float32: tokens sorted by expert, and back."""
    count, top = experts.shape
    groups = params.router.shape[0]
    aligned = preferred_alignment(experts.size, x.dtype, params.gate_up, params.down)
    by_expert = sort_by_expert(experts, groups, aligned)
    gated, sizes = activation_of(activation), by_expert.sizes
    product = functools.partial(
        grouped_matmul, groups=by_expert.groups, dtype=x.dtype, aligned=aligned
    )
    h = product(x, params.gate_up, sizes, rows=by_expert.rows, combine=gated)
    y = product(h, params.down, sizes)[by_expert.places]
    # Summed per token in the order of its own experts, whoever else is in the batch.
    y = y.reshape(count, top, -1).astype(weights.dtype)
    return jnp.sum(y * weights[..., None], axis=1)


class ByExpert(NamedTuple):
    """Pairs of a token and one of its experts, as rows of which each expert's follow each other."""

    sizes: Int32[Array, " E"]  # rows of each expert
    rows: Int32[Array, " M"]  # token of each row
    places: Int32[Array, " TK"]  # row of each pair
    groups: Int32[Array, " M"] | None  # expert of each row, where sizes are as they came


def sort_by_expert(experts: Int32[Array, "T K"], groups: int, aligned: int = 1) -> ByExpert:
    """The rows of an expert are those of its tokens, and up to aligned - 1 of token 0 behind them.

    Where rows are few, sizes are not read by the products, and are not counted then.
    """
    flat = experts.reshape(-1)
    count, top = flat.shape[0], experts.shape[1]
    number = jnp.arange(count, dtype=jnp.int32)
    expert_of_row, order = lax.sort((flat, number), num_keys=1)
    sizes = jnp.bincount(flat, length=groups).astype(jnp.int32)
    places = jnp.zeros(count, jnp.int32).at[order].set(number, unique_indices=True)
    if aligned == 1:
        return ByExpert(sizes, order // top, places, expert_of_row)
    more = -sizes % aligned
    places = places + (jnp.cumsum(more) - more)[flat]
    most = -(-(count + groups * (aligned - 1)) // aligned) * aligned
    rows = jnp.zeros(most, jnp.int32).at[places].set(number // top, unique_indices=True)
    # XLA would find each place again for every element of the rows that it takes from there.
    sizes, rows, places = lax.optimization_barrier((sizes + more, rows, places))
    return ByExpert(sizes, rows, places, None)


def shared_expert(
    params: MoEParams, x: Float[Array, "T D"], activation: Activation
) -> Float[Array, "T D"]:
    """This rank's share of the shared expert, in float32."""
    work = working_dtype(x)
    if params.shared is None:
        return jnp.zeros(x.shape, work)
    h = gated_project(x, params.shared.gate_up, activation_of(activation))
    y = project(h, params.shared.down, dtype=work)
    if params.shared_gate is None:
        return y
    return y * jax.nn.sigmoid(project(x, params.shared_gate, dtype=work))[..., None]
