"""The op as users call it, whichever implementation runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32, Shaped

from ..device import on_hopper
from ..triton import Implementation, use_pallas
from . import hopper, kernel, reference
from .reference import Combine
from .tuning import HopperTuning, hopper_tuning
from .units import ALIGNED

MANY = 96  # rows a group, from which the Hopper kernel is the faster one


def grouped_matmul(
    x: Float[Array, "T K"],
    w: Float[Array, "E *G N K"],
    group_sizes: Int32[Array, " E"],
    *,
    rows: Int32[Array, " M"] | None = None,
    groups: Int32[Array, " M"] | None = None,
    combine: Combine | None = None,
    dtype: DTypeLike | None = None,
    aligned: int = 1,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """y[i] = w[group of row i] x[rows[i]], summed in float32 (float64 for float64 inputs).

    The first group_sizes[0] rows belong to group 0, and so on; rows past the last group give
    zeros. A row's result does not depend on the other rows. Without `rows` they are those of x.

    With `combine`, a group has G matrices, and `combine` takes their results, in float32, to one:
    a gated activation, which is then computed while both are at hand. `dtype` of the result: that
    of the sums if not given.

    `groups`, for callers who have it, is the group of each row (their number for a row of none):
    where rows are few, a kernel goes by it alone, and sizes need not be counted for it.

    `aligned` is a promise: M and all sizes are multiples of it. With `preferred_alignment` a
    faster kernel may run.
    """
    if (combine is None) != (w.ndim == 3):
        raise ValueError(f"w is {w.shape}; expected [E, G, N, K] with combine, [E, N, K] without")
    count = (x if rows is None else rows).shape[0]
    if count and use_pallas(implementation):
        tuning = hopper_tuning(count, x, w, aligned, dtype, interpret)
        if tuning is not None:
            return hopper.grouped_matmul(
                x, w, group_sizes, rows, combine, tuning=tuning, interpret=interpret
            )
        if kernel.supported(x, w):
            return kernel.grouped_matmul(
                x,
                w,
                group_sizes,
                rows=rows,
                groups=groups,
                combine=combine,
                dtype=dtype,
                interpret=interpret,
            )
        if implementation == "pallas":  # asked for by name
            raise NotImplementedError(
                f"x {x.shape} {x.dtype}, w {w.shape} {w.dtype}: the kernel takes inner and output "
                "widths that are multiples of 16, both in bfloat16 or both in float32"
            )
    return reference.grouped_matmul(x, w, group_sizes, rows=rows, combine=combine, dtype=dtype)


def preferred_alignment(
    count: int,
    dtype: DTypeLike,
    *matrices: Shaped[Array, "E *G N K"] | jax.ShapeDtypeStruct,
    implementation: Implementation | None = None,
) -> int:
    """What sizes of groups, `count` rows in all, should be multiples of, whose rows and results are
    of a dtype and which are multiplied by some matrices: rows that fill them up are multiplied too,
    but groups of many rows are then multiplied faster, if all matrices are of a width for it."""
    many = all(count >= MANY * w.shape[0] for w in matrices)
    covered = dtype == jnp.bfloat16 and all(HopperTuning().covers(w) for w in matrices)
    wanted = many and covered and use_pallas(implementation) and on_hopper()
    return ALIGNED if wanted else 1
