"""Suite `engine-moves`: what restoring and demoting checkpoints costs inside a running engine.

Hits: time to the first token behind one cached prefix, by recovery, on an idle engine. Demotions:
throughput of steady decode streams while a number of dense checkpoints a step become the tree's,
as those of other requests would, without the prefill that makes them. The pools are full, so each
of them is an eviction and a demotion; windows with and without them take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jhybrid.config import require
from jhybrid.engine.arguments import add_engine_arguments, positive
from jhybrid.engine.build import create_engine, engine_config
from jhybrid.engine.engine import Engine
from jhybrid.engine.request import PrefixCacheOptions, RecoveryName, Request, SamplingParams

from .flags import counts
from .results import Result, ResultsFile
from .ttft_timeline import REQUEST, show
from .ttft_timeline import record as timeline

SUITE = "engine-moves"
STREAM_PROMPT = 4  # tokens; few, so that all streams start in one step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.set_defaults(recovery="dasc-wr", w_max=64)
    group = parser.add_argument_group("suite")
    group.add_argument("--out", type=Path, required=True, metavar="DIR")
    group.add_argument("--matched", type=positive, default=4096, metavar="N", help="of a hit")
    group.add_argument("--suffix", type=positive, default=32, metavar="N", help="unmatched tokens")
    group.add_argument("--repeat", type=positive, default=20, metavar="N", help="hits an arm")
    group.add_argument("--streams", type=positive, default=16, metavar="N", help="that decode")
    group.add_argument(
        "--rates", type=counts, default=[1, 2, 4], metavar="N,...", help="checkpoints a step"
    )
    group.add_argument("--steps", type=positive, default=60, metavar="N", help="of a window")
    group.add_argument("--rounds", type=positive, default=8, metavar="N", help="windows an arm")
    group.add_argument("--timelines", action="store_true", help="profile one more hit an arm")


def run(args: argparse.Namespace) -> None:
    results, config = ResultsFile(args.out), engine_config(args)
    require(config.compresses, "w_max", config.w_max, "a cutoff, for there to be demotions")
    least = max(args.streams, 2)
    require(config.max_running >= least, "max_running", config.max_running, f"at least {least}")
    tokens = _stream_tokens(len(args.rates), args.steps, args.rounds)
    longest = max(args.matched + args.suffix, STREAM_PROMPT + tokens) + 2
    config = replace(config, max_context=config.max_context or longest)
    engine = create_engine(args.model, config)
    require(engine.max_context >= longest, "max_context", engine.max_context, f"at least {longest}")
    name = engine.model_name.removeprefix("dummy:")

    def record(case: str, arm: str, metric: str, value: float, unit: str, n: int) -> None:
        results.append(Result(SUITE, f"{name}/{case}", arm, metric, value, unit, n))
        print(f"{name}/{case:16} {arm:12} {metric:14} {value:10.3f} {unit}", flush=True)

    load = Load(engine)
    case = f"hit/{args.matched}"
    traces = args.out / "traces" if args.timelines else None
    measured = hits(load, args.matched, args.suffix, args.repeat, traces)
    for arm, (times, replayed) in measured.items():
        record(case, arm, "ttft", 1e3 * statistics.median(times), "ms", len(times))
        record(case, arm, "replayed", replayed, "tokens", len(times))
    windows = decode_windows(load, args.streams, args.rates, args.steps, args.rounds)
    case, plain = f"decode/{args.streams}", windows[0]
    for rate, found in windows.items():
        arm, n = f"{rate}/step", len(found)
        seconds = statistics.median(w.seconds for w in found)
        record(case, arm, "throughput", args.streams * args.steps / seconds, "tokens/s", n)
        record(case, arm, "demotions", statistics.mean(w.demoted for w in found), "1/window", n)
        if rate:
            pairs = zip(found, plain, strict=True)
            costs = [100 * (1 - without.seconds / w.seconds) for w, without in pairs]
            record(case, arm, "slowdown", statistics.median(costs), "%", n)
            record(case, arm, "slowdown_least", min(costs), "%", n)
            record(case, arm, "slowdown_most", max(costs), "%", n)


class Load:
    """Requests of random tokens on one engine, and checkpoints that no request has computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._rng, self._names = engine, np.random.default_rng(0), 0

    def tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self.engine.vocab_size, count).tolist()

    def add(self, prompt: list[int], max_tokens: int, recovery: RecoveryName | None) -> None:
        self._names += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        options = PrefixCacheOptions(recovery)
        self.engine.add(Request(str(self._names), tuple(prompt), params, prefix_cache=options))

    def first_token(self, prompt: list[int], recovery: RecoveryName) -> tuple[float, int]:
        """Seconds to it, and tokens replayed. The engine is idle before and after."""
        begin = time.perf_counter()
        with jax.profiler.TraceAnnotation(REQUEST):
            self.add(prompt, 1, recovery)
            updates = []
            while not updates:
                updates = self.engine.step()
        seconds = time.perf_counter() - begin
        self.drain()
        used = updates[0].prefix_cache
        if used is None or used.recovery != recovery or used.restored_tokens != used.matched_tokens:
            raise RuntimeError(f"expected a hit with {recovery}, got {used}")
        return seconds, used.replayed_tokens

    def drain(self) -> None:
        while self.engine.has_work():
            self.engine.step()
        self.engine.runner.wait()

    def insert(self) -> bool:
        """A page of new tokens and its dense checkpoint, as a request that ends leaves them, in a
        slot that nothing was written to. False while no native slot is free."""
        cache, tokens = self.engine.cache, self.tokens(self.engine.config.page_size)
        lease = cache.admit(tokens, 0, reuse=False, tokens_total=len(tokens))
        if lease is None:
            return False
        lease.set_state_depth(len(tokens))
        cache.finish(lease, tokens)
        return True

    @property
    def compressed_free(self) -> int:
        return self.engine.cache.stats().pools["compressed_slots"].free

    @property
    def demoted(self) -> int:
        return self.engine.cache.stats().demotions["committed"]

    def fill(self) -> None:
        """Until the compressed tier is full: before it is, nothing evicts."""
        while free := self.compressed_free:
            while self.compressed_free and self.insert():
                pass
            self.drain()
            if self.compressed_free == free:
                raise RuntimeError(f"{free} compressed slots stay free: nothing is demoted")


def hits(
    load: Load, matched: int, suffix: int, repeat: int, traces: Path | None = None
) -> dict[RecoveryName, tuple[list[float], int]]:
    """Seconds of each hit, and tokens replayed, by recovery; one first that is not counted.

    Two prefixes: a compressed one, and, both tiers being full, one that stays dense. The arms take
    turns, which keeps both among the youngest.
    """
    branches = itertools.count(1)  # no two hits share more than their prefix

    def store() -> list[int]:
        prefix = load.tokens(matched)
        load.add([*prefix, 0], 1, "off")  # leaves its state at `matched`
        load.drain()
        return prefix

    def hit(recovery: RecoveryName) -> tuple[float, int]:
        prompt = [*prefixes[recovery], next(branches), *load.tokens(suffix - 1)]
        return load.first_token(prompt, recovery)

    compressed = store()
    load.fill()
    prefixes: dict[RecoveryName, list[int]] = {"dasc-nr": compressed, "dasc-wr": compressed}
    hit("dasc-nr")  # a use, before others need its slot
    prefixes["dense"] = store()
    found: dict[RecoveryName, tuple[list[float], int]] = {}
    for number in range(1 + repeat):
        for recovery in ("dense", "dasc-nr", "dasc-wr"):
            seconds, replayed = hit(recovery)
            before = found[recovery][0] if number > 1 else []
            found[recovery] = [*before, seconds], replayed
    if traces is not None:
        for recovery in found:
            told = timeline(lambda arm=recovery: hit(arm), traces / recovery)
            print(recovery, show(told), flush=True)
    return found


def _stream_tokens(rates: int, steps: int, rounds: int) -> int:
    """Enough for all windows and the steps between them."""
    return (2 + rounds) * (1 + rates) * (steps + 8)


@dataclass(frozen=True)
class Window:
    seconds: float
    demoted: int


def decode_windows(
    load: Load, streams: int, rates: list[int], steps: int, rounds: int
) -> dict[int, list[Window]]:
    """Windows by rate, 0 for none: in every round one of each, in an order that turns."""
    every, scheduler = [0, *rates], load.engine.scheduler
    load.fill()
    for _ in range(streams):
        load.add(load.tokens(STREAM_PROMPT), _stream_tokens(len(rates), steps, rounds), "off")
    while scheduler.waiting or not all(s.generated for s in scheduler.running):
        load.engine.step()
    found: dict[int, list[Window]] = {rate: [] for rate in every}
    for rate in every:
        _window(load, streams, rate, steps)  # to warm up
    for number in range(rounds):
        turn = number % len(every)
        for rate in [*every[turn:], *every[:turn]]:
            found[rate].append(_window(load, streams, rate, steps))
    return found


def _window(load: Load, streams: int, rate: int, steps: int) -> Window:
    """Steps of all streams, from a device that has nothing else to do until it has none again."""
    engine = load.engine
    while engine.cache.demoting:
        engine.step()
    engine.runner.wait()
    before = load.demoted
    tokens, begin = 0, time.perf_counter()
    for _ in range(steps):
        for _ in range(rate):
            if not load.insert():
                break
        tokens += sum(len(update.token_ids) for update in engine.step())
    engine.runner.wait()
    seconds = time.perf_counter() - begin
    if tokens != streams * steps:
        raise RuntimeError(f"expected {streams} streams of {steps} tokens, got {tokens} in all")
    return Window(seconds, load.demoted - before)
