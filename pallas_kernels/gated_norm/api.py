"""The op as users call it, whichever implementation runs."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from ..triton import Implementation, use_pallas
from . import kernel, reference


def gated_rms_norm(
    o: Float[Array, "*N H V"],
    weight: Float[Array, " V"],
    gate: Float[Array, "*T Hk X"],
    first: int,
    eps: float,
    activation: Callable[[Array], Array],
    dtype: DTypeLike,
    start: int | Array | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T H V"]:
    """norm(o) activation(gate) in float32, rounded to `dtype`; the norm is over V.

    The gates of the H / Hk heads that share a key head stand one after another in the last
    channels of `gate`, from `first` on. With `start`, o holds packed tokens [N, ...] of which T
    from there on are taken. The kernel takes packed tokens; by name, another case is an error.
    """
    group = o.shape[-2] // gate.shape[-2]
    if gate.shape[-1] - first != group * o.shape[-1]:
        raise ValueError(
            f"gate has {gate.shape[-1]} channels of which {first} are not its own; expected "
            f"{group} heads of {o.shape[-1]} behind them"
        )
    args = (o, weight, gate, first, eps, activation, dtype, start)
    if use_pallas(implementation):
        if kernel.supported(o, gate):
            return kernel.gated_rms_norm(*args, interpret=interpret)
        if implementation == "pallas":
            raise NotImplementedError(
                f"o {o.shape} {o.dtype}, gate {gate.shape} {gate.dtype}: the kernel takes packed "
                "tokens [T, H, V] of bfloat16 or float32"
            )
    return reference.gated_rms_norm(*args)
