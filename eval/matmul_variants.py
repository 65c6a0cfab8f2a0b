"""Suite `matmul-variants`: tunings of skinny_matmul over one model's weight shapes, beside XLA."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.layers.mlp import gated_activation
from pallas_kernels.skinny_matmul import kernel, reference
from pallas_kernels.skinny_matmul.kernel import MAX_VECTOR_ROWS, SkinnyTuning

from .device_time import REPEAT, Loop, copy_rate
from .kernel_cases import CACHE_BYTES, relative_rms
from .results import Result, ResultsFile

# (matrices combined, outputs, inner): Qwen3.5-4B's
SHAPES = {
    "gate_up": (2, 9216, 2560),
    "down": (1, 2560, 9216),
    "qkvz": (1, 12288, 2560),
    "out": (1, 2560, 4096),
    "ba": (1, 64, 2560),
    "head": (1, 248320, 2560),
}
BOUND = 5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rows", default="2,32,64", metavar="N,...")
    parser.add_argument("--shapes", default=",".join(SHAPES), metavar="NAME,...")


def tunings(rows: int) -> list[SkinnyTuning]:
    if rows <= MAX_VECTOR_ROWS:
        grid = product((1, 2, 4), (256, 512, 1024), (1, 2, 4), (1, 3, 5))
        return [SkinnyTuning(*values) for values in grid if values[0] * values[1] >= 512]
    grid = product((16, 32, 64), (128, 256), (2, 4), (2, 3, 4, 6))
    return [SkinnyTuning(o, i, w, stages=s) for o, i, w, s in grid]


def run(args: argparse.Namespace) -> None:
    results, on_gpu = ResultsFile(args.out), jax.default_backend() == "gpu"
    rate = copy_rate(1 << 31 if on_gpu else 1 << 20)
    for name in args.shapes.split(","):
        groups, count, inner = SHAPES[name] if on_gpu else (SHAPES[name][0], 64, 256)
        combine = (lambda a, b: gated_activation(a, b, "silu")) if groups == 2 else None
        size = 2 * groups * count * inner
        keys = jax.random.split(jax.random.key(0), int(np.ceil(2 * CACHE_BYTES / size)) + 1)
        keys = keys if on_gpu else keys[:2]
        sets = [
            jax.random.normal(k, (groups, count, inner), jnp.bfloat16) * jnp.bfloat16(0.02)
            for k in keys
        ]
        for rows in map(int, args.rows.split(",")):
            x = jax.random.normal(jax.random.key(1), (rows, inner), jnp.bfloat16)
            found = reference.skinny_matmul(
                x.astype(jnp.float32), sets[0].astype(jnp.float32), combine, None
            )
            labels = ["xla", *map(str, tunings(rows))]
            options = [None, *tunings(rows)]

            def call(x: Any, w: Any, tuning: Any, combine: Any = combine) -> Any:
                if tuning is None:
                    return reference.skinny_matmul(x, w, combine, None)
                return kernel.skinny_matmul(
                    x, w, combine, None, tuning=tuning, interpret=not on_gpu
                )

            def build(
                tuning: Any,
                x: Any = x,
                call: Any = call,
                sets: Any = sets,
                size: int = size,
                rows: int = rows,
                count: int = count,
                found: Any = found,
            ) -> Any:
                try:

                    def step(x: Any, w: Any) -> Any:
                        return call(x, w, tuning), x

                    loop = Loop(step, sets, x, size / rate, span=0.015)
                    loop.compile()
                    error = relative_rms(
                        jax.jit(lambda x, w: call(x, w, tuning))(x, sets[0]), found
                    )
                    return loop, error
                except Exception as error:
                    return error, None

            with ThreadPoolExecutor(12) as pool:
                built = list(pool.map(build, options))
            rows_of = []
            for label, (loop, error) in zip(labels, built, strict=True):
                if error is None or not error < BOUND:
                    print(f"  {name} {rows} {label}: {loop!r:.150} {error}", flush=True)
                    continue
                seconds = loop.seconds()
                rows_of.append((seconds, label))
                results.append(
                    Result(
                        "kernels",
                        f"skinny/{name}/{rows}",
                        label,
                        "time",
                        1e3 * seconds,
                        "ms",
                        REPEAT,
                    )
                )
            print(f"{name} x {rows} rows, floor {1e6 * size / rate:.1f} us", flush=True)
            for seconds, label in sorted(rows_of)[:5] + [r for r in rows_of if r[1] == "xla"]:
                print(
                    f"  {1e6 * seconds:9.1f} us {size / seconds / 1e12:.2f} TB/s  {label}",
                    flush=True,
                )
