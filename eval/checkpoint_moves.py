"""Suite `checkpoint-moves`: device time of copying, packing and restoring one model's checkpoints.

No weights but the decay parameters: pools are made at the model's sizes. The arm `dense` copies
whole native slots, what a hit on a dense checkpoint costs where its slot cannot be read in place.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jhybrid.engine.build import find_model
from jhybrid.models.specs import cache_specs, model_specs
from jhybrid.params import init_params, map_specs
from jhybrid.retention.horizon import is_decay, static_horizons
from jhybrid.retention.movers import compressed_specs, load, store
from jhybrid.retention.prepare import prepare
from jhybrid.retention.ratios import CheckpointDtype
from jhybrid.retention.selection import select
from jhybrid.sharding import make_mesh, sharded
from pallas_kernels.ragged import or_outside

from .device_time import REPEAT, Loop, copy_rate
from .results import Result, ResultsFile

BATCHES = (1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="demo, dummy:<preset> or a checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--w-max", type=int, default=64, metavar="N")


def run(args: argparse.Namespace) -> None:
    results, model, mesh = ResultsFile(args.out), find_model(args.model), make_mesh(1)
    config, dtype = model.config, jnp.bfloat16
    weights = init_params(model_specs(config), jax.random.key(0), dtype, mesh, wanted=is_decay)
    plan = select(static_horizons(weights, config), args.w_max)
    maps = prepare(plan, config).maps
    on_gpu = jax.default_backend() == "gpu"
    rate = copy_rate(1 << 31 if on_gpu else 1 << 20)
    name, slots = model.name.removeprefix("dummy:"), 2 * max(BATCHES)
    print(f"{name}: w_max {args.w_max} keeps {plan.keep.mean():.3f}; copy {rate / 1e12:.2f} TB/s")

    def zeros(spec: Any) -> Any:
        return jnp.zeros(spec.shape, spec.dtype_in(dtype))

    caches = map_specs(zeros, cache_specs(config, 1, 1, slots))
    caches = replace(caches, recurrent=jax.random.normal(jax.random.key(1), caches.recurrent.shape))

    def record(case: str, arm: str, seconds: float, moved: int) -> None:
        results.append(Result("checkpoint-moves", case, arm, "time", 1e3 * seconds, "ms", REPEAT))
        share = moved / seconds / rate
        print(
            f"{case:44} {arm:12} {1e6 * seconds:9.1f} us  {share:.2f} of the copy rate", flush=True
        )

    def timed(step: Any, state: Any, batch: int) -> float:
        pairs = np.arange(2 * batch, dtype=np.int32).reshape(2, batch)
        sets = [jnp.asarray(pairs), jnp.asarray(pairs[::-1].copy())]
        whole = PartitionSpec()
        moved = sharded(step, mesh, (whole, whole), whole)
        loop = Loop(lambda s, p: ((), moved(s, p)), sets, state, 1e-3)
        loop.compile()
        return loop.seconds()

    slot_bytes = sum(x.nbytes for x in (caches.recurrent, caches.conv)) // slots
    maps = jax.tree.map(jnp.asarray, maps)
    for batch in BATCHES:
        case = f"{name}/{batch}"
        record(f"copy/{case}", "dense", timed(_copy, caches, batch), 2 * batch * slot_bytes)
        kinds: tuple[CheckpointDtype, ...] = ("float32", "int8")
        for kind in kinds:
            pool = map_specs(zeros, compressed_specs(config, maps, slots, kind))
            packed = sum(x.nbytes for x in jax.tree.leaves(pool)) // slots
            kept = int(plan.keep.mean() * slot_bytes)
            state = (caches, pool, maps)
            seconds = timed(_store, state, batch)
            record(f"store/{case}", f"dasc/{kind}", seconds, batch * (kept + packed))
            seconds = timed(_load, state, batch)
            record(f"load/{case}", f"dasc-nr/{kind}", seconds, batch * (packed + slot_bytes))


def _copy(caches: Any, pairs: Any) -> Any:
    def whole_slots(pool: Any) -> Any:
        at = pool.at[or_outside(pairs[1], pool.shape[0])]
        return at.set(pool[pairs[0]], mode="drop", unique_indices=True)

    recurrent, conv = whole_slots(caches.recurrent), whole_slots(caches.conv)
    return replace(caches, recurrent=recurrent, conv=conv)


def _store(state: Any, pairs: Any) -> Any:
    caches, pool, maps = state
    return caches, store(caches, pool, maps, pairs[0], pairs[1]), maps


def _load(state: Any, pairs: Any) -> Any:
    caches, pool, maps = state
    return load(caches, pool, maps, pairs[0], pairs[1]), pool, maps
