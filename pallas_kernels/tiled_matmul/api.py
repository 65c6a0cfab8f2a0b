"""The op as users call it, whichever implementation runs."""

from __future__ import annotations

from jax import Array
from jaxtyping import Float, Int32

from ..device import on_hopper
from ..triton import Implementation, use_pallas
from . import kernel, reference
from .reference import Combine
from .tuning import TiledTuning


def tiled_matmul(
    x: Float[Array, "M K"],
    weights: Float[Array, "G N K"],
    combine: Combine | None = None,
    count: Int32[Array, ""] | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """combine(x W_1^T, ..., x W_G^T) in x's type; `combine` is elementwise.

    Sums are in float32. They are rounded to x's type before they are combined, in float32 again.
    Of M rows the first `count` are wanted (all without it): the result has zeros in
    those after them, or what they would have given. No row depends on another, whatever it holds.

    The kernel takes bfloat16 on a Hopper GPU, one matrix or two with `combine`; by name, another
    case is an error. Unnamed, XLA's product is taken where tiles would leave blocks idle.
    """
    if combine is None and weights.shape[0] != 1:
        raise ValueError(f"{weights.shape[0]} weight matrices and nothing to combine them")
    if use_pallas(implementation):
        tuning = TiledTuning.default(x, weights, interpret)
        named = implementation == "pallas"
        if tuning is not None and (named or (on_hopper() and tuning.fills(x, weights))):
            args = (x, weights, combine, count)
            return kernel.tiled_matmul(*args, tuning=tuning, interpret=interpret)
        if named:
            raise NotImplementedError(
                f"x {x.shape} {x.dtype}, weights {weights.shape} {weights.dtype}: the kernel takes "
                "one or two matrices of bfloat16, an inner width in multiples of 64, and rows and "
                "outputs in multiples of a tile's"
            )
    return reference.tiled_matmul(x, weights, combine, count)
