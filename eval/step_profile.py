"""Suite `profile`: where the device time of one prefill, decode step or replay goes, by kernel.

Steps are run bare (no scheduler), under JAX's profiler; kernels of one name are added up. A decode
step includes the draw of its tokens.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.config import require
from jhybrid.engine.arguments import add_engine_arguments
from jhybrid.engine.build import create_engine, engine_config
from jhybrid.engine.empty_batches import empty_prefill, empty_replay
from jhybrid.engine.model_runner import ModelRunner
from jhybrid.engine.programs import PREFILL
from jhybrid.engine.programs import Call as ProgramCall
from jhybrid.engine.sampler import SampleMode
from jhybrid.models.cut import lower_layers
from jhybrid.packed import pack

from .flags import listed
from .results import Result, ResultsFile

REPEAT = 5
STEPS = 32  # decode steps that sequences go on before they begin again behind their context
GREEDY = SampleMode.GREEDY
FORMS = "prefill:TOKENS[:CONTEXT], decode:BATCH[:CONTEXT] or replay:TOKENS"


@dataclass(frozen=True)
class Step:
    """One of FORMS; CONTEXT tokens are in the cache, and a replay's group inputs."""

    kind: str
    size: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Step:
        kind, *numbers = text.split(":")
        most = {"prefill": 2, "decode": 2, "replay": 1}.get(kind, 0)
        known = 1 <= len(numbers) <= most
        require(known, "steps", text, FORMS)
        return cls(kind, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0)

    def __str__(self) -> str:
        return f"{self.kind}/{self.size}" + (f"@{self.context}" if self.context else "")


_steps = listed(Step.parse, FORMS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    group = parser.add_argument_group("suite")
    group.add_argument("--out", type=Path, required=True, metavar="DIR")
    group.add_argument("--steps", type=_steps, required=True, metavar="KIND:SIZE[:CONTEXT],...")
    group.add_argument("--top", type=int, default=25, metavar="N", help="kernels to print")


def run(args: argparse.Namespace) -> None:
    if jax.default_backend() != "gpu":
        raise ValueError("times of kernels need a GPU, which this device is not")
    results = ResultsFile(args.out)
    engine = create_engine(args.model, engine_config(args), warm_up=False)
    runner, name = engine.runner, engine.model_name.removeprefix("dummy:")
    calls = [make_call(runner, step) for step in args.steps]
    begin = time.perf_counter()
    programs = {program[:2]: program for call in calls for program in call.programs}
    done = len(list(runner.programs.compile_all(list(programs.values()))))
    print(f"compiled {done} programs in {time.perf_counter() - begin:.1f} s", flush=True)
    for step, call in zip(args.steps, calls, strict=True):
        wall = median_seconds(call)
        kernels = profile(call)
        busy = sum(seconds for seconds, _ in kernels.values())
        for metric, value in (("step", wall), ("device_busy", busy)):
            case = f"{name}/{step}"
            results.append(Result("profile", case, "jhybrid", metric, 1e3 * value, "ms", REPEAT))
        print(f"\n{name}/{step}: step {1e3 * wall:.3f} ms, kernels {1e3 * busy:.3f} ms", flush=True)
        order = sorted(kernels.items(), key=lambda item: -item[1][0])
        for kernel, (seconds, count) in order[: args.top]:
            print(f"  {1e3 * seconds:9.3f} ms {count:6.0f} x  {kernel[:110]}")
        rest = order[args.top :]
        total = 1e3 * sum(seconds for _, (seconds, _) in rest)
        print(f"  {total:9.3f} ms {sum(n for _, (_, n) in rest):6.0f} x  others", flush=True)


@dataclass
class Call:
    programs: list[ProgramCall]  # that it runs
    run: Callable[[], Any]


def make_call(runner: ModelRunner, step: Step) -> Call:
    """The step on pages and slots that nobody else uses, all sequences of one length."""
    if step.kind == "replay":
        return _replay_call(runner, step.size)
    page_size, pages = runner.page_size, runner.caches.keys.shape[0]
    sequences, new = (1, step.size) if step.kind == "prefill" else (step.size, STEPS)
    needed = -(-(step.context + new) // page_size)
    fits = sequences * needed <= pages and needed <= runner.buckets.pages
    require(fits, "steps", str(step), f"{pages} pages and a table of {runner.buckets.pages}")
    tables = np.arange(sequences * needed, dtype=np.int32).reshape(sequences, needed)
    return (_prefill_call if step.kind == "prefill" else _decode_call)(runner, step, tables)


def _replay_call(runner: ModelRunner, tokens: int) -> Call:
    """One call, be it a bucket or not."""
    pages = runner.caches.group_inputs
    require(pages is not None, "group_inputs", None, "pages of group inputs, for a replay")
    assert pages is not None
    room = pages.rows.shape[0] * runner.page_size
    require(tokens <= room, "steps", f"replay:{tokens}", f"at most {room} tokens of group inputs")
    batch: Any = empty_replay(runner, tokens)
    rng = np.random.default_rng(0)
    batch.token_ids[:] = rng.integers(0, min(256, runner.vocab), tokens)
    batch.input_slots[:] = np.arange(tokens)
    batch.segments.cu[1:] = tokens
    batch.segments.store[0] = 0
    packed = pack(batch)

    def run() -> Any:
        runner.replay(packed)
        return runner.caches.conv

    return Call([("replay", (tokens,), (runner.params, runner.caches, packed))], run)


def _prefill_call(runner: ModelRunner, step: Step, tables: np.ndarray) -> Call:
    whole = step.context == 0 and runner.prefers_whole_prompt(step.size)
    batch: Any = empty_prefill(runner, step.size, 2, whole_prompt=whole)
    rng = np.random.default_rng(0)
    batch.token_ids[:] = rng.integers(0, min(256, runner.vocab), step.size)
    batch.positions[:] = step.context + np.arange(step.size)
    batch.kv_slots[:] = batch.positions
    batch.cu_seqlens[1:] = step.size
    batch.page_table[0, : tables.shape[1]] = tables[0]
    batch.segments.cu[1:] = step.size
    batch.segments.store[0] = 0
    packed = pack(batch)
    size, args = (step.size, 2, int(whole)), (runner.params, runner.caches, packed)
    lower, upper = PREFILL
    programs = [
        (lower, size, args),
        (upper, size, (*args, runner.stream_shape(step.size, lower_layers(runner.config)))),
    ]
    return Call(programs, lambda: runner.prefill(packed))


def _decode_call(runner: ModelRunner, step: Step, tables: np.ndarray) -> Call:
    size = (max(runner.buckets.decode[0], step.size),)
    lines: Any = runner.empty_lines(size[0])
    lines.rows[: step.size] = lines.state_slots[: step.size] = np.arange(step.size)
    lines.starts[: step.size] = step.context
    lines.page_table[: step.size, : tables.shape[1]] = tables
    args = (runner.params, runner.caches, runner.hidden_shape(size[0]), runner.drawn, lines)
    drawn = (runner.params, runner.rows, runner.hidden_shape(size[0]), lines.rows)
    programs = [("decode", size, args), (f"draw-{GREEDY.name}", size, drawn)]
    steps = itertools.count()

    def run() -> Any:
        if next(steps) % STEPS == 0:
            _begin_again(runner)
        return runner.draw(*runner.decode(lines), GREEDY)

    return Call(programs, run)


def _begin_again(runner: ModelRunner) -> None:
    """Rows that have drawn nothing: a sequence goes on from its context."""
    params = runner.rows.params
    none = jax.device_put(jnp.zeros_like(params.generated), params.generated.sharding)
    runner.rows = replace(runner.rows, params=replace(params, generated=none))


def median_seconds(call: Call) -> float:
    """Host time a step when several are in flight, as the engine keeps them."""
    spans = []
    _run(call, 1)
    for _ in range(REPEAT):
        begin = time.perf_counter()
        _run(call, 4)
        spans.append((time.perf_counter() - begin) / 4)
    return statistics.median(spans)


def _run(call: Call, times: int) -> None:
    """One behind the other, and done; a call may take over what the one before returned."""
    out = None
    for _ in range(times):
        out = call.run()
    jax.block_until_ready(out)


def profile(call: Call) -> dict[str, tuple[float, float]]:
    """Device seconds and launches of each kernel, for one step."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _run(call, REPEAT)
        return read_trace(next(Path(folder).rglob("*.xplane.pb")))


def read_trace(path: Path) -> dict[str, tuple[float, float]]:
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # other lines show the same time again, by module and by op
            for event in line.events:
                kernel = re.sub(r"[._]\d+$", "", event.name)
                seconds[kernel] += event.duration_ns * 1e-9
                launches[kernel] += 1
    return {kernel: (seconds[kernel] / REPEAT, launches[kernel] / REPEAT) for kernel in seconds}
