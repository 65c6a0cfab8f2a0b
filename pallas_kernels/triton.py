"""What every Pallas-Triton kernel here needs: launch, block sizes, matrix products.

Triton arrays have power-of-two sizes, and a value cannot be sliced. So a dimension such as 96 is
held as a list of power-of-two blocks (64 and 32), each loaded by itself: no lane is wasted on
padding and nothing is masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

Implementation = Literal["pallas", "xla"]
Products = Literal["bf16", "f16", "bf16x3", "tf32", "tf32x3"]

MAX_BLOCK = 128  # of a dimension held in registers


def use_pallas(implementation: Implementation | None) -> bool:
    """None: Pallas where JAX runs on an NVIDIA GPU, XLA elsewhere."""
    if implementation not in (None, "pallas", "xla"):
        raise ValueError(f"implementation is {implementation!r}; expected 'pallas', 'xla' or None")
    if implementation is None:
        return jax.default_backend() == "gpu"
    return implementation == "pallas"


def power_of_two_blocks(size: int, largest: int = MAX_BLOCK) -> tuple[tuple[int, int], ...]:
    """(offset, width) of power-of-two blocks, wide ones first: 96 is (0, 64), (64, 32)."""
    blocks, offset = [], 0
    while offset < size:
        width = min(largest, 1 << ((size - offset).bit_length() - 1))
        blocks.append((offset, width))
        offset += width
    return tuple(blocks)


def dividing_block(size: int, largest: int) -> int:
    """The largest power of two that divides `size` and is at most `largest`."""
    return min(size & -size, largest)


@dataclass(frozen=True)
class Dot:
    """a @ b on the tensor cores, accumulated in float32.

    bf16 keeps 8 bits of the operands, f16 and tf32 11 (f16 between 6e-5 and 65504, at twice the
    rate); tf32x3 is about float32. (HIGHEST would not use the tensor cores at all.) bf16x3 takes
    float32 operands in two parts, 16 bits, of any size; bf16 ones are exact, and cost a product
    less. Interpreted, float32 operands of the others are multiplied exactly.
    """

    products: Products
    interpret: bool = False

    def __call__(self, a: Array, b: Array, *, ta: bool = False, tb: bool = False) -> Array:
        precision: Any = None
        if self.products == "bf16x3":
            half = Dot("bf16", self.interpret)
            pairs = [
                half(x, y, ta=ta, tb=tb)
                for i, x in enumerate(_halves(a))
                for j, y in enumerate(_halves(b))
                if i + j < 2
            ]
            return functools.reduce(jnp.add, reversed(pairs))
        if self.products in ("bf16", "f16"):
            half = jnp.bfloat16 if self.products == "bf16" else jnp.float16
            a, b = a.astype(half), b.astype(half)
        else:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            if self.interpret:
                precision = lax.Precision.HIGHEST
            elif self.products == "tf32x3":
                precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            else:
                precision = lax.Precision.DEFAULT
        contract = ((0 if ta else 1,), (1 if tb else 0,))
        return lax.dot_general(
            a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )


def _halves(x: Array) -> tuple[Array, ...]:
    """bf16 arrays whose sum is x, but for 2^-17 of it."""
    if x.dtype == jnp.bfloat16:
        return (x,)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def iota(shape: tuple[int, ...], dimension: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, dimension)


def exp2(x: Array, interpret: bool) -> Array:
    """2^x of a float32 array in one instruction, 0 below 1e-38; the exact one also keeps
    subnormal results, for three more."""
    scalar = x.ndim == 0  # Triton takes assembly of arrays alone
    return jnp.exp2(x) if interpret or scalar else _assembly("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: Array, interpret: bool) -> Array:
    """In one instruction; off by 2e-7 at most between 1/2 and 2."""
    return jnp.log2(x) if interpret else _assembly("lg2.approx.ftz.f32 $0, $1;", x)


def multiply_add(a: Array, b: Array, c: Array, interpret: bool) -> Array:
    """a b + c of float32 arrays in one instruction: written out, the two are never fused."""
    if interpret:
        return a * b + c
    return _assembly("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def reciprocal(x: Array, interpret: bool) -> Array:
    """1 / x of a float32 array within a unit in the last place, in one instruction; a division
    takes eight. 0 below 1e-38 in size."""
    return 1.0 / x if interpret else _assembly("rcp.approx.ftz.f32 $0, $1;", x)


def _assembly(code: str, *args: Array) -> Array:
    constraints = ",".join(["=f"] + ["f"] * len(args))
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.float32)
    (out,) = plt.elementwise_inline_asm(
        code, args=args, constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )
    return out


def barrier(interpret: bool) -> None:
    """Order a program's accesses to memory among its threads."""
    if not interpret:
        plt.debug_barrier()


def triton_call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    out_shape: tuple[jax.ShapeDtypeStruct, ...],
    *,
    warps: int,
    stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Callable[..., tuple[Array, ...]]:
    """A kernel over whole arrays in device memory; the first grid axis runs fastest.

    Inputs may be trees: the kernel gets trees of references, None where an array is None, then one
    reference for each output. `aliases` counts the arrays among the inputs.
    Compiler parameters are always given: they are what selects Triton on every version of JAX.
    """

    def launch(*inputs: Any) -> tuple[Array, ...]:
        leaves, tree = jax.tree.flatten(inputs)

        def body(*refs: Any) -> None:
            kernel(*jax.tree.unflatten(tree, refs[: len(leaves)]), *refs[len(leaves) :])

        return pl.pallas_call(
            body,
            grid=grid,
            out_shape=out_shape,
            input_output_aliases=aliases or {},
            interpret=interpret,
            name=name,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        )(*leaves)

    return launch
