"""The op as users call it, whichever implementation runs."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from ..triton import Implementation, use_pallas
from . import kernel, reference
from .reference import Combine


def grouped_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "E N K"],
    group_sizes: Int32[Array, " E"],
    *,
    rows: Int32[Array, " M"] | None = None,
    combine: Combine | None = None,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "M Nc"]:
    """y[i] = w[group of row i] x[rows[i]], summed in float32 (float64 for float64 inputs).

    The first group_sizes[0] rows belong to group 0, and so on; rows past the last group give
    zeros. A row's result does not depend on the other rows. Without `rows` they are those of x.

    `combine` takes the first and the second half of the outputs, in float32, to one result of half
    the width: a gated activation, which is then computed while both are at hand. `dtype` of the
    result: that of the sums if not given.
    """
    if _choose(implementation, x, w, combine):
        return kernel.grouped_matmul(
            x, w, group_sizes, rows=rows, combine=combine, dtype=dtype, interpret=interpret
        )
    return reference.grouped_matmul(x, w, group_sizes, rows=rows, combine=combine, dtype=dtype)


def _choose(
    implementation: Implementation | None, x: Array, w: Array, combine: Combine | None
) -> bool:
    """True for Pallas. Asked for by name, a case the kernel does not cover is an error."""
    if not use_pallas(implementation):
        return False
    covered = kernel.supported(x, w, combine)
    if not covered and implementation == "pallas":
        raise NotImplementedError(
            f"x {x.shape} {x.dtype}, w {w.shape} {w.dtype}: the kernel takes inner and output "
            "widths that are multiples of 16, both in bfloat16 or both in float32"
        )
    return covered
