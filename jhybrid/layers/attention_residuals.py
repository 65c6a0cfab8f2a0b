"""Attention residuals (Kimi-K3): a layer's input is a softmax mixture of earlier residual streams.

    score_j = sum_c (V_jc / rms(V_j)) n_c p_c;  mixture = sum_j softmax(score)_j V_j

The candidates V are the streams stored at each block's start and the running one. All of it is
per token, so nothing of it is cached.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.precision import working_dtype

from ..params import scale, weight


@struct.dataclass
class ResidualMixParams:
    norm: Any  # [D] float32
    query: Any  # [D]


def residual_mix_specs(hidden: int) -> ResidualMixParams:
    return ResidualMixParams(norm=scale(hidden), query=weight((hidden, None), fan_in=hidden))


def mix_residuals(
    params: ResidualMixParams,
    stored: tuple[Float[Array, "*B D"], ...],
    running: Float[Array, "*B D"],
    eps: float,
) -> Float[Array, "*B D"]:
    """The mixture of the stored streams and the running one, in float32, cast back."""
    work = working_dtype(running)
    streams = [x.astype(work) for x in (*stored, running)]
    direction = params.norm.astype(work) * params.query.astype(work)
    scores = [
        jnp.sum(x * direction, axis=-1) * lax.rsqrt(jnp.mean(x * x, axis=-1) + eps) for x in streams
    ]
    shares = jax.nn.softmax(jnp.stack(scores, axis=-1), axis=-1)
    mixed = sum(shares[..., j, None] * x for j, x in enumerate(streams))
    return jnp.asarray(mixed).astype(running.dtype)
