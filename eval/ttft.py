"""Suite `ttft`: from a fresh hit to the first token, by recovery and by where the KV is.

For every matched length and every arm a trunk is run once; each request then shares that many of
its tokens and has a suffix of its own. The first of them, which is not counted, leaves a checkpoint
where it parts from the trunk: `dense` goes on from there, replays from zeros do not look at it, and
for `anchored` every request parts a token earlier, so that it starts from the checkpoint of the
grid before. Times are host wall clock around `LLM.generate` for one token on an idle engine
(Tail-Replay, its Table 2).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jhybrid.config import require
from jhybrid.engine.arguments import add_engine_arguments
from jhybrid.engine.build import engine_config
from jhybrid.engine.llm import LLM
from jhybrid.engine.model_runner import ModelRunner
from jhybrid.engine.programs import PREFILL
from jhybrid.engine.request import (
    PrefixCacheOptions,
    PrefixCacheUsage,
    RecoveryName,
    SamplingParams,
)
from jhybrid.engine.warm_up import warm_up

from .flags import counts, shares, texts
from .results import Result, ResultsFile
from .ttft_report import write_report
from .ttft_timeline import REQUEST, record, show

HOST_MEMORY = 16 * 2**30  # unless given


@dataclass(frozen=True)
class Arm:
    """`host`: KV, group inputs and states are there when the request comes. `overlap`: the KV comes
    while the replay runs; else the replay waits for it."""

    recovery: RecoveryName
    ratio: float | None = None
    host: bool = False
    overlap: bool = True

    @property
    def name(self) -> str:
        if self.recovery == "off":
            return "full_prefill"
        ratio = "" if self.ratio is None else f"/{self.ratio:g}"
        if not self.host or self.recovery == "dense":
            how = "host" if self.host else "device"
        else:
            how = "overlap+skip" if self.overlap else "serial"
        return f"{self.recovery}{ratio}/{how}"


def arms(ratios: Sequence[float]) -> list[Arm]:
    found = [Arm("off"), Arm("dense"), Arm("dense", host=True), Arm("anchored", 1.0)]
    found += [Arm("tail-replay", ratio) for ratio in ratios]
    for ratio in ratios:
        found += [Arm("tail-replay", ratio, True, overlap) for overlap in (False, True)]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.set_defaults(group_inputs="all", host_memory=HOST_MEMORY)
    group = parser.add_argument_group("suite")
    group.add_argument("--out", type=Path, required=True, metavar="DIR")
    lengths = [8192, 16384, 31847]
    group.add_argument("--lengths", type=counts, default=lengths, metavar="N,...")
    group.add_argument("--ratios", type=shares, default=[0.05, 0.1], metavar="R,...")
    group.add_argument("--suffix", type=int, default=32, metavar="N", help="unmatched tokens")
    group.add_argument("--repeat", type=int, default=20, metavar="N")
    group.add_argument("--full-repeat", type=int, default=5, metavar="N", help="of full prefill")
    group.add_argument(
        "--timelines", type=texts, default=[], metavar="ARM,...", help="profile a request of each"
    )
    group.add_argument(
        "--arms", type=texts, default=[], metavar="TEXT,...", help="parts of arm names"
    )


def run(args: argparse.Namespace) -> None:
    known = arms(args.ratios)
    names = [arm.name for arm in known]
    for part in args.arms:
        some = any(part in name for name in names)
        require(some, "--arms", part, f"part of one of {', '.join(names)}")
    for name in args.timelines:
        require(name in names, "--timelines", name, f"one of {', '.join(names)}")
    chosen = [arm for arm in known if _is_wanted(arm, args.arms)]
    longest = max(args.lengths) + args.suffix + 2
    args.max_context = args.max_context or longest + args.suffix
    least = args.repeat + 2
    good = min(args.lengths) > least
    require(good, "lengths", min(args.lengths), f"more tokens than the {least} requests of an arm")
    results = ResultsFile(args.out)
    rng = np.random.default_rng(0)
    with LLM(args.model, warm_up=False, **vars(engine_config(args))) as llm:
        name = llm.engine.model_name.removeprefix("dummy:")
        compile_large(llm.engine.runner, args.suffix)
        for length in args.lengths:
            for arm in chosen:
                repeat = args.full_repeat if arm.recovery == "off" else args.repeat
                case = _Case(llm, arm, length, args.suffix, rng)
                times, usage = case.measure(repeat)
                label = f"{name}/{length}"
                for metric, value in _summaries(times):
                    results.append(Result("ttft", label, arm.name, metric, value, "ms", repeat))
                for metric, value in _depths(usage):
                    results.append(Result("ttft", label, arm.name, metric, value, "tokens", 1))
                print(f"{label:24} {arm.name:32} {_summaries(times)[0][1]:9.2f} ms", flush=True)
                if arm.name in args.timelines:
                    trace = args.out / "traces" / f"{label}/{arm.name}".replace("/", "-")
                    print(show(record(case.request, trace)), flush=True)
    write_report(args.out)


def compile_large(runner: ModelRunner, suffix: int) -> None:
    """What takes long to compile, at once; all else is compiled when it first runs."""
    b = runner.buckets
    question = b.prefill_bucket(b.prefill_step([(suffix, False)]))
    used = b.all_prefill_tokens[-1], question

    def needed(name: str, size: tuple[int, ...]) -> bool:
        return name == "replay" or (name in PREFILL and size[0] in used)

    for _ in warm_up(runner, needed):
        pass


def _is_wanted(arm: Arm, parts: list[str]) -> bool:
    return not parts or any(part in arm.name for part in parts)


def _summaries(times: list[float]) -> list[tuple[str, float]]:
    """As the paper reports it, and less moved by one slow run."""
    return [("ttft", 1e3 * statistics.mean(times)), ("ttft_median", 1e3 * statistics.median(times))]


def _depths(usage: PrefixCacheUsage) -> list[tuple[str, int]]:
    """Of the last request: what the time was spent on."""
    return [("restored", usage.restored_tokens), ("replayed", usage.replayed_tokens)]


class _Case:
    """One trunk, cached afresh, and requests that share `length` of its tokens, or a few less."""

    def __init__(
        self, llm: LLM, arm: Arm, length: int, suffix: int, rng: np.random.Generator
    ) -> None:
        self._llm, self._arm, self._suffix, self._rng = llm, arm, suffix, rng
        self._length, self._count = length, 0  # of requests so far
        require(llm.engine.flush_cache(), "engine", "busy", "an idle one")
        self._trunk = self._tokens(length + 1)
        self._generate(self._trunk, PrefixCacheOptions("dense"))

    def measure(self, repeat: int) -> tuple[list[float], PrefixCacheUsage]:
        """Seconds of each of `repeat` requests after one that warms up, and the last one's usage.
        RuntimeError where a request was not served as the arm says."""
        times, usage = [], self.request()[1]
        for _ in range(repeat):
            seconds, usage = self.request()
            times.append(seconds)
        return times, usage

    def request(self) -> tuple[float, PrefixCacheUsage]:
        engine, arm = self._llm.engine, self._arm
        if arm.host:
            engine.cache.offload()
            engine.host.offload()
            engine.runner.wait()
        self._count += 1
        matched = self._length - (self._count if arm.recovery == "anchored" else 0)
        prompt = self._trunk[:matched] + self._diverging(self._trunk[matched])
        engine.host.overlap = arm.overlap
        begin = time.perf_counter()
        with jax.profiler.TraceAnnotation(REQUEST):
            usage = self._generate(prompt, PrefixCacheOptions(arm.recovery, arm.ratio))
        seconds = time.perf_counter() - begin
        engine.host.overlap = True
        expected = (arm.recovery, 0 if arm.recovery == "off" else matched)
        if (usage.recovery, usage.matched_tokens) != expected:
            raise RuntimeError(f"{arm.name}: expected {expected}, got {usage}")
        return seconds, usage

    def _generate(self, prompt: list[int], options: PrefixCacheOptions) -> PrefixCacheUsage:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        usage = self._llm.generate([prompt], params, prefix_cache=options)[0].prefix_cache
        assert usage is not None
        return usage

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._llm.engine.vocab_size, count).tolist()

    def _diverging(self, token: int) -> list[int]:
        """A suffix that parts from the trunk's next token, and from those of requests before."""
        other = (token + self._count) % self._llm.engine.vocab_size
        return [other, *self._tokens(self._suffix - 1)]
