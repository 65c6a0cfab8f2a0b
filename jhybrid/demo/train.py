"""Trains the demo models in a fixed time: `python -m jhybrid.demo.train --corpus DIR --out DIR`.

Everything follows the clock: phases, learning rate, and the end. A model's folder is usable after
the first checkpoint, so that a kill loses at most the time since the last one. Of several models
one is trained after the other, while the steps of the next are compiled. On two GPUs, side by side:

    CUDA_VISIBLE_DEVICES=0 python -m jhybrid.demo.train ... --preset gdn --minutes 8 &
    CUDA_VISIBLE_DEVICES=1 python -m jhybrid.demo.train ... --preset kda --minutes 8 &
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..models.specs import model_specs
from ..params import count_params
from ..sharding import make_mesh
from ..weights import load_hf_params
from .batches import TASK_NAMES, Batch, BatchSpec, BatchStream, choose, worker_pool
from .card import write_card
from .clock import Clock, learning_rate
from .corpus import Corpus
from .evaluate import evaluate
from .export import write_model
from .log import Log, log_of_start
from .model import initial_params, static_horizons
from .optimize import (
    DeviceBatch,
    Step,
    TrainState,
    initial_state,
    lower_step,
    make_optimizer,
    make_step,
    replicated,
)
from .presets import PRESETS, Preset
from .score import THRESHOLDS, Sheet, make_sheet
from .tokenizer import write_tokenizer

IN_FLIGHT = 8  # steps handed to the device and not waited for: keeps the clock honest
COMPILERS = 3


class Run:
    """A model in training: its state, and the step of each row length as soon as it is compiled."""

    def __init__(
        self, name: str, mesh: Mesh, seed: int, start: Path | None, compilers: ThreadPoolExecutor
    ) -> None:
        preset = PRESETS[name]
        self.name, self.mesh = name, mesh
        self.preset = preset if start is None else preset.continued()
        self.config = preset.architecture.model_config()
        initial = initial_params(self.config, seed)
        self.initial_horizons = static_horizons(initial)
        given = (
            None if start is None else load_hf_params(start / name, self.config, mesh, jnp.float32)
        )
        optimizer = make_optimizer(self.config, self.preset)
        state = initial_state(initial if given is None else given, optimizer)
        self.state: TrainState = jax.device_put(state, replicated(mesh))
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        step = make_step(self.config, self.preset, optimizer, mesh, dtype)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state)
        self._compiled: dict[int, Future[Step]] = {
            length: compilers.submit(self._compile, step, shapes, length)
            for length in self.preset.lengths
        }

    def _compile(self, step: Step, state: TrainState, length: int) -> Step:
        rows = self.preset.tokens_per_batch[length] // length
        return lower_step(step, state, self.mesh, rows, length).compile()

    def wait(self) -> None:
        """For the step that training begins with."""
        self._compiled[self.preset.lengths[0]].result()

    def ready(self) -> list[int]:
        return [length for length, future in self._compiled.items() if future.done()]

    def step(self, batch: Batch, rate: float) -> jax.Array:
        on_device = jax.device_put(device_batch(batch), replicated(self.mesh))
        compiled = self._compiled[batch.length].result()
        self.state, loss = compiled(self.state, on_device, np.float32(rate))
        return loss

    def save(self, out: Path) -> None:
        write_model(out, self.state.params, self.preset.architecture.hf_config())


def device_batch(batch: Batch) -> DeviceBatch:
    return DeviceBatch(batch.ids, batch.weights, batch.task, batch.state_cut, batch.key_cut)


def spec_maker(run: Run, clock: Clock, seed: int) -> Callable[[], BatchSpec]:
    """A function that says what the next batch is: by the clock, among the lengths compiled."""
    counter, preset = itertools.count(), run.preset

    def next_spec() -> BatchSpec:
        index = next(counter)
        phase, ready = preset.phase_at(clock.fraction), run.ready()
        wanted = {n: s for n, s in phase.lengths.items() if n in ready}
        rng = np.random.default_rng((seed, index))
        length = int(choose(rng, {str(n): s for n, s in wanted.items()}, 1)[0]) if wanted else None
        # nothing compiled that the phase wants: the longest there is, else wait for the first
        length = length or max(ready, default=preset.lengths[0])
        rows = preset.tokens_per_batch[length] // length
        return BatchSpec((seed, index), length, rows, tuple(phase.mix.items()))

    return next_spec


def train(
    run: Run, pool: ProcessPoolExecutor, out: Path, clock: Clock, seed: int, log: Log
) -> None:
    """Train until the clock says stop; writes weights to `out` along the way and at the end."""
    preset = run.preset
    stream = BatchStream(pool, spec_maker(run, clock, seed), preset.ahead)
    tokens, step, saved = 0, 0, clock.elapsed
    window, running = _Window(clock), deque[jax.Array]()
    while clock.fraction < 1:
        batch = next(stream)
        rate = learning_rate(
            clock.fraction,
            step,
            peak=preset.peak_lr,
            final=preset.final_lr,
            hold_until=preset.hold_until,
            warmup=preset.warmup_steps,
        )
        running.append(run.step(batch, rate))
        if len(running) > IN_FLIGHT:
            running.popleft().block_until_ready()
        step, tokens = step + 1, tokens + batch.weights.size
        window.add(batch)
        if step % preset.log_every == 0 or step == 1:
            run.state, record = window.close(run.state)
            head = {"kind": "step", "step": step, "tokens": tokens}
            phase = preset.phase_at(clock.fraction).name
            extra = {"phase": phase, "learning_rate": rate, "batches_ready": stream.waiting()}
            log.write(head | {"seconds": round(clock.elapsed, 2)} | extra | record)
        if clock.elapsed - saved > preset.save_seconds:
            saved = clock.elapsed
            run.save(out)
    run.save(out)
    stream.close()


class _Window:
    """The stretch between two log lines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens, self._steps, self._since = 0, 0, clock.elapsed

    def add(self, batch: Batch) -> None:
        self._tokens, self._steps = self._tokens + batch.weights.size, self._steps + 1

    def close(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The measurements of the stretch, read from the device and cleared there."""
        by_task, norm, skipped = jax.device_get((state.by_task, state.grad_norm, state.skipped))
        now = self._clock.elapsed
        seen = {name: row for name, row in zip(TASK_NAMES, by_task, strict=True) if row[2] > 0}
        record = {
            "tokens_per_second": round(self._tokens / max(now - self._since, 1e-9)),
            "grad_norm": round(float(norm) / max(self._steps, 1), 3),
            "skipped": int(skipped),
            "loss": {name: round(float(row[0] / row[2]), 4) for name, row in seen.items()},
            "accuracy": {name: round(float(row[1] / row[2]), 4) for name, row in seen.items()},
        }
        self._tokens, self._steps, self._since = 0, 0, now
        cleared = {"by_task": state.by_task * 0, "grad_norm": state.grad_norm * 0}
        return dataclasses.replace(state, **cleared), record


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="jhybrid.demo.train", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the three texts")
    parser.add_argument("--out", type=Path, required=True, help="gets a folder for each model")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", nargs="+", choices=sorted(PRESETS), default=["gdn", "kda"])
    parser.add_argument("--workers", type=int, default=None, help="processes that make batches")
    parser.add_argument(
        "--start-from", type=Path, metavar="DIR", help="an earlier --out, to go on from its weights"
    )
    args = parser.parse_args(arguments)
    start: Path | None = args.start_from
    earlier = {n: [] if start is None else log_of_start(start / n, n) for n in args.preset}
    total = Clock(args.minutes * 60, 0)
    total.stop_hard()
    mesh, compilers = make_mesh(1), ThreadPoolExecutor(COMPILERS)
    runs = [Run(name, mesh, args.seed, start, compilers) for name in args.preset]
    # read by the workers as they start; this process has its device by now, and they need none
    os.environ["JAX_PLATFORMS"] = "cpu"
    workers = args.workers or max(1, min(12, (os.cpu_count() or 2) - 2))
    pool = worker_pool(args.corpus, workers)
    try:
        sheets = _sheets(pool, args.corpus, runs[0].preset)
        for done, run in enumerate(runs):
            run.wait()
            seconds = total.left / (len(runs) - done)
            out, log = args.out / run.name, earlier[run.name]
            _train_and_measure(run, pool, out, seconds, args.seed, args.corpus, sheets, log)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        compilers.shutdown(wait=False, cancel_futures=True)


Sheets = dict[tuple[str, int], Future[Sheet]]


def _sheets(pool: ProcessPoolExecutor, corpus: Path, preset: Preset) -> Sheets:
    return {
        (task, length): pool.submit(make_sheet, corpus, task, length, preset.scored)
        for length in preset.scored_lengths
        for task in THRESHOLDS
    }


def _train_and_measure(
    run: Run,
    pool: ProcessPoolExecutor,
    out: Path,
    seconds: float,
    seed: int,
    corpus: Path,
    sheets: Sheets,
    earlier: list[dict[str, Any]],
) -> None:
    clock, preset = Clock(seconds, run.preset.eval_seconds), run.preset
    write_tokenizer(out)
    log = Log(out)
    for record in earlier:
        log.write(record)
    start = {
        "kind": "start",
        "preset": run.name,
        "seed": seed,
        "minutes": round(seconds / 60, 2),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "parameters": count_params(model_specs(run.config)),
        "trial_bytes": preset.trial_bytes,
        "scored": preset.scored,
    }
    log.write(start)
    train(run, pool, out, clock, seed, log)
    log.write({"kind": "evaluation", "initial_horizons": run.initial_horizons})
    made = {key: sheet.result() for key, sheet in sheets.items()}
    for name, value in evaluate(
        run.state.params, run.config, preset, Corpus.load(corpus), made, clock, seed
    ):
        log.write({"kind": "evaluation", name: value, "seconds": round(clock.elapsed, 1)})
        write_card(out)


if __name__ == "__main__":
    main()
