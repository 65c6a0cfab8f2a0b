"""A matrix product for Hopper whose epilogue costs no time of the tensor cores.

Every block of threads walks over tiles of the result. One group of threads loads steps of both
operands into a ring of stages; two groups of consumers multiply, each half of the tile's rows, with
one step always in flight. What a tile leaves is rounded and kept in registers while the products of
the next tile run: its activation and its stores go beside the first steps, a
piece with each. So the tensor cores wait for nothing but a rounding between tiles.

Tiles of rows that are not wanted are not multiplied; their number is data.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic import REGISTERS, compiler_params, interpreter, shared, transposed
from .reference import Combine
from .store import Store
from .tuning import CONSUMERS, TiledTuning
from .walk import PAIR, Walk


# Jitted so that layers of one shape are lowered once.
@functools.partial(jax.jit, static_argnames=("combine", "tuning", "interpret"))
def tiled_matmul(
    x: Array,
    weights: Array,
    combine: Combine | None,
    count: Array | None,
    *,
    tuning: TiledTuning,
    interpret: bool = False,
) -> Array:
    rows, groups = x.shape[0], weights.shape[0]
    count = jnp.full((1,), rows if count is None else count, jnp.int32)
    body = functools.partial(_kernel, tuning=tuning, combine=combine)
    operand = functools.partial(shared, width=tuning.inner)
    barrier: Any = plgpu.Barrier
    if tuning.pair:  # a stage is free when both blocks have read it: a load fills it in both
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=(PAIR,))
    turned = shared((CONSUMERS, tuning.inner), tuning.columns)
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, weights.shape[1]), x.dtype),
        scratch_types=dict(
            x=operand((tuning.stages, tuning.rows)),
            weights=operand((tuning.stages, tuning.columns)),
            out=shared((CONSUMERS, tuning.slots(groups), tuning.share), tuning.piece),
            loaded=plgpu.Barrier(num_arrivals=1 + groups, num_barriers=tuning.stages),
            free=barrier(num_arrivals=CONSUMERS, num_barriers=tuning.stages),
            **(dict(turned=turned) if interpret else {}),
        ),
        grid=(tuning.walkers,),
        grid_names=("blocks",),
        cluster=(2,) if tuning.pair else (),
        cluster_names=(PAIR,) if tuning.pair else (),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        compiler_params=compiler_params(),
        interpret=interpreter() if interpret else None,
    )
    return run(count, x, weights)


def _kernel(
    count_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any,
    *, x: Any, weights: Any, out: Any, loaded: Any, free: Any, turned: Any = None,
    tuning: TiledTuning, combine: Combine | None,
) -> None:  # fmt: skip
    walk = Walk.of(count_ref[0], x_ref, w_ref, tuning)
    ring = Ring(x, weights, loaded, free, turned, tuning)
    group = lax.axis_index("group")

    @pl.when(group == CONSUMERS)
    def _load() -> None:
        plgpu.set_max_registers(REGISTERS["producer"], action="decrease")
        _produce(walk, ring, x_ref, w_ref)

    @pl.when(group < CONSUMERS)
    def _multiply() -> None:
        plgpu.set_max_registers(REGISTERS["consumer"], action="increase")
        store = Store(group, out, out_ref, combine, tuning, w_ref.shape[0])
        _consume(walk, ring, store, group, w_ref.shape[2] // tuning.inner)


@dataclass(frozen=True)
class Ring:
    """Stages of operands: a position goes round, and is never ahead of a free or loaded stage."""

    x: Any  # [stages, rows, inner]
    weights: Any  # [stages, columns, inner]
    loaded: Any
    free: Any
    turned: Any  # [consumers, inner, columns] where a reference cannot be turned: interpreted
    tuning: TiledTuning

    def turned_weights(self, stage: Array, group: Array) -> Any:
        """[inner, columns]"""
        scratch = None if self.turned is None else self.turned.at[group]
        return transposed(self.weights.at[stage], scratch)

    def next(self, stage: Array) -> Array:
        return lax.select(stage == self.tuning.stages - 1, jnp.int32(0), stage + 1)


def _produce(walk: Walk, ring: Ring, x_ref: Any, w_ref: Any) -> None:
    """Loads the operands of every step as soon as its stage is free."""
    tuning, (groups, _, inner) = ring.tuning, w_ref.shape
    shared = PAIR if tuning.pair else None

    def tile(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        row, column = walk.place(number)

        def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            stage, filled = carry
            part = pl.ds(index * tuning.inner, tuning.inner)
            loaded = ring.loaded.at[stage]

            @pl.when(filled == tuning.stages)
            def _wait() -> None:
                plgpu.barrier_wait(ring.free.at[stage])

            x = x_ref.at[pl.ds(row, tuning.rows), part]
            plgpu.copy_gmem_to_smem(x, ring.x.at[stage], loaded)
            for group in range(groups):
                w = w_ref.at[group, pl.ds(column, walk.width), part]
                lines = ring.weights.at[stage, pl.ds(group * walk.width, walk.width)]
                plgpu.copy_gmem_to_smem(w, lines, loaded, collective_axes=shared)
            return ring.next(stage), lax.min(filled + 1, jnp.int32(tuning.stages))

        return lax.fori_loop(0, inner // tuning.inner, step, carry)

    start = (jnp.int32(0), jnp.int32(0))
    stage, _ = lax.fori_loop(0, walk.wanted_steps, tile, start)

    @pl.when(walk.wanted_steps > 0)
    def _end() -> None:
        """A block stays until its partner has nothing more to tell it."""
        last = stage
        for _ in range(tuning.stages):
            plgpu.barrier_wait(ring.free.at[last])
            last = ring.next(last)


def _consume(walk: Walk, ring: Ring, store: Store, group: Array, steps: int) -> None:
    """Multiplies the tiles; each is stored beside the first steps of the next."""
    tuning = ring.tuning
    shape = tuning.share, tuning.columns
    lines = pl.ds(group * tuning.share, tuning.share)

    def tile(number: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
        first, row, column, held = carry

        def products(sums: Any) -> tuple[Array, Array]:
            def step(stage: Array, before: Array | None, beside: int | None = None) -> Array:
                plgpu.barrier_wait(ring.loaded.at[stage])
                plgpu.wgmma(sums, ring.x.at[stage, lines], ring.turned_weights(stage, group))
                if beside is not None:
                    store.piece(held, beside, row, column, number > 0)
                plgpu.wgmma_wait(1)  # for the step before this one
                if before is not None:
                    plgpu.barrier_arrive(ring.free.at[before])
                return ring.next(stage)

            stage, before = first, None
            for piece in range(store.pieces):
                stage, before = step(stage, before, piece), stage

            def rest(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                stage, before = carry
                return step(stage, before), stage

            stage, before = lax.fori_loop(store.pieces, steps, rest, (stage, before))
            made = sums[...].astype(held.dtype)
            plgpu.barrier_arrive(ring.free.at[before])
            return made, stage

        made, stage = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        return stage, *walk.place(number), made

    zero = jnp.int32(0)
    held = jnp.zeros(shape, store.out.dtype)
    start = zero, zero, zero, held
    _, row, column, held = lax.fori_loop(0, walk.wanted_steps, tile, start)

    @pl.when(walk.wanted_steps > 0)
    def _last() -> None:
        for piece in range(store.pieces):
            store.piece(held, piece, row, column)

    store.zeros(walk)
    plgpu.wait_smem_to_gmem(0)
