"""What every Mosaic GPU kernel here needs: shared memory as the tensor cores like it, its options,
and what the interpreter lacks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

REGISTERS = {"consumer": 232, "producer": 40}  # of a thread, with two groups of consumers
SWIZZLE = 128  # bytes


def compiler_params() -> Any:
    return plgpu.CompilerParams(
        approx_math=True,
        # A wait for products or copies is a wait of the whole group; more barriers cost 2 %.
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=512,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )


def shared(shape: tuple[int, ...], width: int) -> Any:
    """Rows of shared memory, `width` wide, as the tensor cores and the copies like them."""
    swizzle = min(SWIZZLE, 2 * width)
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((*shape, width), jnp.bfloat16, transforms=transforms)


def transposed(rows: Any, scratch: Any) -> Any:
    """A reference to rows [M, N] as [N, M]; interpreted, which turns no references, a copy in
    `scratch`. None: it is not."""
    if scratch is None:
        return rows.transpose((1, 0))
    scratch[...] = rows[...].T
    return scratch


def interpreter(**options: Any) -> Any:
    params: Any = getattr(plgpu, "InterpretGPUParams", None)
    if params is not None:
        return params(**options)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # before jax 0.11

    return InterpretGPUParams(**options)
