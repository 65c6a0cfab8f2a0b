"""Lowering kernels for a GPU on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

TRITON_CALL = "__gpu$xla.gpu.triton"


def lower_for_cuda(function: Callable[..., Any], *avals: Any) -> str:
    """From jax 0.11 the device must be named."""
    context: Any = contextlib.nullcontext()
    if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11):
        device = jax.sharding.AbstractDevice("NVIDIA H200", 1, "cuda")
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        context = jax.sharding.use_abstract_mesh(mesh)
    with context:
        return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def equations(function: Callable[..., Any], *avals: Any) -> Iterator[Any]:
    """Of a function's jaxpr and of all within it, kernels included."""
    pending = [jax.make_jaxpr(function)(*avals)]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple | list):
            pending += item
        elif hasattr(item, "eqns"):
            for equation in item.eqns:
                yield equation
                pending += equation.params.values()
