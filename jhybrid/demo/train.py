"""Trains the demo model within a fixed time: `python -m jhybrid.demo.train --corpus DIR --out DIR`.

Everything follows the clock: phases, learning rate, and the end. The output folder is usable after
the first checkpoint, so that a kill loses at most the time since the last one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..models.hybrid import model_specs
from ..params import count_params
from ..sharding import make_mesh
from .batches import TASK_NAMES, Batch, BatchSpec, BatchStream, choose
from .card import write_card
from .clock import Clock, learning_rate
from .corpus import Corpus
from .evaluate import evaluate
from .export import write_model
from .model import initial_params, static_horizons
from .optimize import (
    Step,
    TrainState,
    compile_step,
    initial_state,
    make_optimizer,
    make_step,
    replicated,
)
from .presets import PRESETS, Preset
from .tokenizer import write_tokenizer

IN_FLIGHT = 8  # steps handed to the device and not waited for: keeps the clock honest


class Log:
    """train_log.jsonl: one record a line, on disk as soon as written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        shown = {k: v for k, v in record.items() if k not in ("samples", "initial_horizons")}
        print(json.dumps(shown), flush=True)


class Steps:
    """The compiled step of each row length; all but the first are compiled while training runs."""

    def __init__(self, step: Step, state: TrainState, mesh: Mesh, preset: Preset) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._compiled: dict[int, Future[Step]] = {
            length: self._pool.submit(
                compile_step, step, state, mesh, preset.tokens_per_batch[length] // length, length
            )
            for length in preset.lengths
        }

    def ready(self) -> list[int]:
        return [length for length, future in self._compiled.items() if future.done()]

    def __getitem__(self, length: int) -> Step:
        return self._compiled[length].result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def spec_maker(preset: Preset, clock: Clock, steps: Steps, seed: int) -> Any:
    """A function that says what the next batch is: by the clock, among the lengths compiled."""
    counter = itertools.count()

    def next_spec() -> BatchSpec:
        index = next(counter)
        phase, ready = preset.phase_at(clock.fraction), steps.ready()
        wanted = {n: s for n, s in phase.lengths.items() if n in ready}
        rng = np.random.default_rng((seed, index))
        length = int(choose(rng, {str(n): s for n, s in wanted.items()}, 1)[0]) if wanted else None
        # nothing compiled that the phase wants: the longest there is, else wait for the first
        length = length or max(ready, default=preset.lengths[0])
        rows = preset.tokens_per_batch[length] // length
        return BatchSpec((seed, index), length, rows, tuple(phase.mix.items()))

    return next_spec


def train(
    preset: Preset, corpus: Path, out: Path, clock: Clock, seed: int, workers: int, log: Log
) -> TrainState:
    """Train until the clock says stop; writes weights to `out` along the way and at the end."""
    mesh, config = make_mesh(1), preset.architecture.model_config()
    accelerated = jax.default_backend() != "cpu"
    dtype = jnp.bfloat16 if accelerated else jnp.float32
    optimizer = make_optimizer(config, preset)
    state = initial_state(initial_params(config, seed), optimizer)
    state = jax.device_put(state, replicated(mesh))
    steps = Steps(make_step(config, preset, optimizer, mesh, dtype), state, mesh, preset)
    # read by the workers as they start; this process has its device by now, and they need none
    os.environ["JAX_PLATFORMS"] = "cpu"
    stream = BatchStream(corpus, spec_maker(preset, clock, steps, seed), workers, preset.ahead)
    tokens, step, saved = 0, 0, clock.elapsed
    window, running = _Window(clock), deque[jax.Array]()
    try:
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
            state, loss = steps[batch.length](state, *_on_device(batch, mesh), np.float32(rate))
            running.append(loss)
            if len(running) > IN_FLIGHT:
                running.popleft().block_until_ready()
            step, tokens = step + 1, tokens + batch.weights.size
            window.add(batch)
            if step % preset.log_every == 0 or step == 1:
                state, record = window.close(state)
                head = {"kind": "step", "step": step, "tokens": tokens}
                phase = preset.phase_at(clock.fraction).name
                extra = {"phase": phase, "learning_rate": rate, "batches_ready": stream.waiting()}
                log.write(head | {"seconds": round(clock.elapsed, 2)} | extra | record)
            if clock.elapsed - saved > preset.save_seconds:
                saved = clock.elapsed
                write_model(out, state.params, preset.architecture.hf_config())
    finally:
        stream.close()
        steps.close()
    write_model(out, state.params, preset.architecture.hf_config())
    return state


def _on_device(batch: Batch, mesh: Mesh) -> tuple[Any, ...]:
    return jax.device_put((batch.ids, batch.weights, batch.task), replicated(mesh))


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
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo")
    parser.add_argument("--workers", type=int, default=None, help="processes that make batches")
    args = parser.parse_args(arguments)
    preset = PRESETS[args.preset]
    clock = Clock(args.minutes * 60, preset.eval_seconds)
    clock.stop_hard()
    workers = args.workers or max(1, min(12, (os.cpu_count() or 2) - 2))

    args.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.out)
    log = Log(args.out / "train_log.jsonl")
    start = {
        "kind": "start",
        "preset": args.preset,
        "seed": args.seed,
        "minutes": args.minutes,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "parameters": count_params(model_specs(preset.architecture.model_config())),
        "trial_bytes": preset.trial_bytes,
        "workers": workers,
    }
    log.write(start)
    state = train(preset, args.corpus, args.out, clock, args.seed, workers, log)

    before = static_horizons(initial_params(preset.architecture.model_config(), args.seed))
    log.write({"kind": "evaluation", "initial_horizons": before})
    corpus = Corpus.load(args.corpus)
    for name, value in evaluate(state.params, preset, corpus, clock, args.seed):
        log.write({"kind": "evaluation", name: value, "seconds": round(clock.elapsed, 1)})
        write_card(args.out)


if __name__ == "__main__":
    main()
