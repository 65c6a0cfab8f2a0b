"""Check of the gated delta rule's kernels before they are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule import decode_gated_delta_rule, ragged_gated_delta_rule

from .kernel_cases import Data, KernelCase, relative_rms


def op(case: KernelCase, pool: Any, data: Data, implementation: Any, interpret: bool) -> Any:
    """(o, pool)"""
    options = {"implementation": implementation, "interpret": interpret}
    if case.decode:
        return decode_gated_delta_rule(data.qkv, data.gates, pool, 0, data.slots, **options)
    segments, most = case.segments(data.slots), case.sequences
    args = (data.qkv, data.gates, pool, 0, segments)
    return ragged_gated_delta_rule(*args, sequences=most, **options)


def reference(case: KernelCase) -> tuple[jax.Array, jax.Array]:
    """Outputs of the case's first data, and states in their slots, in float32 arithmetic in XLA."""
    data = case.data(0)
    wide = data._replace(qkv=data.qkv.astype(jnp.float32))
    o, pool = jax.jit(op, static_argnums=(0, 3, 4))(case, case.pool(), wide, "xla", False)
    return o, pool[data.slots, 0]


def error_of(
    case: KernelCase, step: Callable[[Any, Data], Any], expected: tuple[jax.Array, jax.Array]
) -> float:
    """The larger relative RMS of outputs and states of `step(pool, data) -> (o, pool)`."""
    data = case.data(0)
    o, pool = step(case.pool(), data)
    return max(map(relative_rms, (o, pool[data.slots, 0]), expected))
