"""The grouped product for Hopper: a block of threads walks over pieces of groups of rows.

The tensor cores multiply 64 lines of their first operand at a time, but any multiple of 8 of the
second. A router's groups are of any size: so the first operand is the group's matrix, the second
its rows, and what comes out is the transpose of the result. One group of threads loads steps of
both into a ring of stages; others multiply, each a share of the columns. While one
stores what it has made, the others have the tensor cores, and go ahead.
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
from .gathered import barriers, copy_rows, init_barriers, wait_rows
from .hopper_store import GroupedStore
from .reference import Combine
from .tuning import HopperTuning
from .units import ALIGNED, FIELDS, LINES, Unit, list_units


# Jitted so that layers of one shape are lowered once.
@functools.partial(jax.jit, static_argnames=("combine", "tuning", "interpret"))
def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    rows: Array | None,
    combine: Combine | None,
    *,
    tuning: HopperTuning,
    interpret: bool = False,
) -> Array:
    if interpret and rows is not None:  # by copies of the accelerator, which are interpreted
        x, rows = x[rows], None
    w = w.reshape(w.shape[0], -1, *w.shape[-2:])
    _, matrices, outputs, inner = w.shape
    count = (x if rows is None else rows).shape[0]
    width = tuning.columns // matrices
    head, units = list_units(
        group_sizes, count, outputs // width, tuning.tallest, interpret=interpret
    )
    operand = functools.partial(shared, width=tuning.inner)
    consumers = tuning.consumers
    turned = shared((consumers, tuning.inner), tuning.tallest)
    loads = tuning.columns // LINES + int(rows is None)
    gathers = {} if rows is None else dict(copied=barriers(tuning.stages), ready=plgpu.Barrier())
    run = plgpu.kernel(
        functools.partial(_kernel, tuning=tuning, matrices=matrices, combine=combine),
        out_type=jax.ShapeDtypeStruct((count, outputs), x.dtype),
        scratch_types=dict(
            x=operand((tuning.stages, tuning.tallest)),
            weights=operand((tuning.stages, tuning.columns)),
            out=plgpu.SMEM((consumers * tuning.slots, tuning.chunk, LINES), x.dtype),
            loaded=plgpu.Barrier(num_arrivals=loads, num_barriers=tuning.stages),
            free=plgpu.Barrier(num_arrivals=consumers, num_barriers=tuning.stages),
            **gathers,
            **(dict(turned=turned) if interpret else {}),
        ),
        grid=(tuning.blocks,),
        grid_names=("blocks",),
        num_threads=consumers + 1,
        thread_name="group",
        compiler_params=compiler_params(),
        interpret=interpreter(out_of_bounds_reads="uninitialized") if interpret else None,
    )
    index = () if rows is None else (rows,)
    return run(head, units, *index, x, w.reshape(-1, outputs, inner))


def _kernel(
    head_ref: Any, units_ref: Any, *refs: Any,
    x: Any, weights: Any, out: Any, loaded: Any, free: Any, copied: Any = None, ready: Any = None,
    turned: Any = None, tuning: HopperTuning, matrices: int, combine: Combine | None,
) -> None:  # fmt: skip
    *index_refs, x_ref, w_ref, out_ref = refs
    work = Work(head_ref, units_ref, lax.axis_index("blocks"), tuning, matrices)
    ring = Ring(x, weights, loaded, free, copied, turned, tuning)
    group, consumers = lax.axis_index("group"), tuning.consumers

    @pl.when(group == consumers)
    def _load() -> None:
        plgpu.set_max_registers(REGISTERS["producer"], action="decrease")
        if copied is not None:
            init_barriers(copied)
            plgpu.barrier_arrive(ready)
        _produce(work, ring, x_ref, w_ref, *index_refs)

    @pl.when(group < consumers)
    def _multiply() -> None:
        plgpu.set_max_registers(REGISTERS["consumer"], action="increase")
        if copied is not None:
            plgpu.barrier_wait(ready)
        interpret = turned is not None
        store = GroupedStore(group, out, tuning.slots, out_ref, combine, matrices, interpret)
        _consume(work, ring, store, x_ref.shape[1] // tuning.inner)
        store.zeros(head_ref[1], work.me, tuning.blocks)


@dataclass(frozen=True)
class Work:
    """The units of a block."""

    head_ref: Any
    units_ref: Any
    me: Array
    tuning: HopperTuning
    matrices: int

    @property
    def count(self) -> Array:
        blocks = self.tuning.blocks
        return lax.div(self.head_ref[0] - self.me + (blocks - 1), jnp.int32(blocks))

    def unit(self, number: Array) -> Unit:
        """Or any, past the last. To be read one ahead: memory is far, and a tile may be short."""
        last = self.units_ref.shape[0] // FIELDS - 1
        at = lax.min(number * self.tuning.blocks + self.me, jnp.int32(last))
        return Unit.read(self.units_ref, at)

    def by_height(self, unit: Unit, run: Any) -> None:
        """`run` with the least of the heights, known when it is compiled, that holds the unit."""
        below = 0
        for height in self.tuning.heights:
            fits = (unit.height > below) & (unit.height <= height)
            pl.when(fits)(functools.partial(run, height))
            below = height


@dataclass(frozen=True)
class Ring:
    """Stages of operands. Step t of a block, over all of its units, is in stage t mod stages."""

    x: Any  # [stages, tallest, inner]
    weights: Any  # [stages, columns, inner]
    loaded: Any
    free: Any
    copied: Any  # when rows are gathered: barriers that say so
    turned: Any  # [consumers, inner, tallest] where a reference cannot be turned: interpreted
    tuning: HopperTuning

    def stage(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.tuning.stages))

    def turn(self, step: Array) -> Array:
        """How often the stage of a step was filled before."""
        return lax.div(step, jnp.int32(self.tuning.stages))

    def wait(self, step: Array) -> None:
        """Until both operands of a step are there."""
        stage = self.stage(step)
        plgpu.barrier_wait(self.loaded.at[stage])
        if self.copied is not None:
            wait_rows(self.copied, stage, self.turn(step))

    def turned_rows(self, stage: Array, height: int, group: Array) -> Any:
        """[inner, height]"""
        scratch = None if self.turned is None else self.turned.at[group, :, pl.ds(0, height)]
        return transposed(self.x.at[stage, pl.ds(0, height)], scratch)


def _produce(work: Work, ring: Ring, x_ref: Any, w_ref: Any, rows_ref: Any = None) -> None:
    """Loads the operands of every step as soon as its stage is free."""
    tuning, steps = ring.tuning, x_ref.shape[1] // ring.tuning.inner
    lines, matrices = tuning.columns // LINES, work.matrices

    def load(number: Array, unit: Unit) -> Unit:
        after = work.unit(number + 1)

        def step(index: Array, _: None) -> None:
            time = number * steps + index
            stage = ring.stage(time)
            first = index * tuning.inner
            part = pl.ds(first, tuning.inner)
            loaded = ring.loaded.at[stage]

            @pl.when(time >= tuning.stages)
            def _wait() -> None:
                plgpu.barrier_wait(ring.free.at[stage])

            for n in range(lines):  # those of a consumer follow each other
                block, matrix = divmod(n, matrices)
                column = unit.column * (tuning.columns // matrices) + block * LINES
                w = w_ref.at[unit.group * matrices + matrix, pl.ds(column, LINES), part]
                to = ring.weights.at[stage, pl.ds(n * LINES, LINES)]
                plgpu.copy_gmem_to_smem(w, to, loaded)
            if rows_ref is not None:
                at = stage, unit.row, unit.height, first
                copy_rows(x_ref, rows_ref, ring.x, ring.copied, *at)
            else:

                def copy(height: int) -> None:
                    x = x_ref.at[pl.ds(pl.multiple_of(unit.row, ALIGNED), height), part]
                    plgpu.copy_gmem_to_smem(x, ring.x.at[stage, pl.ds(0, height)], loaded)

                work.by_height(unit, copy)

        lax.fori_loop(0, steps, step, None)
        return after

    lax.fori_loop(0, work.count, load, work.unit(jnp.int32(0)))

    @pl.when(work.count > 0)
    def _end() -> None:
        """A block stays until nobody tells it anything any more."""
        for stage in range(tuning.stages):
            plgpu.barrier_wait(ring.free.at[stage])


def _consume(work: Work, ring: Ring, store: GroupedStore, steps: int) -> None:
    tuning, group = ring.tuning, store.group
    share = tuning.columns // tuning.consumers
    lines = pl.ds(group * share, share)

    def multiply(number: Array, unit: Unit) -> Unit:
        after, first = work.unit(number + 1), number * steps

        def tile(height: int) -> None:
            def products(sums: Any) -> Array:
                def step(index: Array, _: None) -> None:
                    stage = ring.stage(first + index)
                    ring.wait(first + index)
                    rows = ring.turned_rows(stage, height, group)
                    plgpu.wgmma(sums, ring.weights.at[stage, lines], rows)
                    plgpu.wgmma_wait(1)  # for the step before this one

                    @pl.when(index > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(ring.free.at[ring.stage(first + index - 1)])

                lax.fori_loop(0, steps, step, None)
                made = sums[...]
                plgpu.barrier_arrive(ring.free.at[ring.stage(first + (steps - 1))])
                return made

            made = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((share, height), jnp.float32))
            store.tile(made, unit.row, unit.column * (tuning.columns // work.matrices), unit.rows)

        work.by_height(unit, tile)
        return after

    lax.fori_loop(0, work.count, multiply, work.unit(jnp.int32(0)))
