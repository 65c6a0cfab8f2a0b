"""Suite `model`: how fast a model prefills and decodes, through the engine as users run it.

Times are host wall clock around `LLM.generate`, so scheduling, dispatch and reading back count.
Only programs that the cases run are compiled, before any is timed; with `--whole-start` all that a
server compiles, and the time from nothing to a warm engine is a result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from jhybrid.engine.arguments import add_engine_arguments
from jhybrid.engine.build import engine_config
from jhybrid.engine.llm import LLM
from jhybrid.engine.request import PrefixCacheOptions, SamplingParams

from .flags import counts
from .results import Result, ResultsFile
from .used_programs import compile_used

FRESH = PrefixCacheOptions(recovery="off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    group = parser.add_argument_group("suite")
    group.add_argument("--out", type=Path, required=True, metavar="DIR")
    group.add_argument("--prefill", type=counts, default=[512, 2048], metavar="N,N,...")
    group.add_argument("--decode", type=counts, default=[1, 8], metavar="BATCH,...")
    group.add_argument("--decode-context", type=int, default=1024, metavar="N")
    group.add_argument("--decode-tokens", type=int, default=128, metavar="N")
    group.add_argument("--repeat", type=int, default=5, metavar="N")
    group.add_argument("--whole-start", action="store_true", help="time a server's start, too")


def run(args: argparse.Namespace) -> None:
    results = ResultsFile(args.out)
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    with LLM(args.model, warm_up=args.whole_start, **vars(engine_config(args))) as llm:
        engine = llm.engine
        name = engine.model_name.removeprefix("dummy:")

        def record(case: str, metric: str, value: float, unit: str, n: int) -> None:
            results.append(Result("model", f"{name}/{case}", "jhybrid", metric, value, unit, n))
            print(f"{name}/{case:24} {metric:16} {value:10.3f} {unit}", flush=True)

        if args.whole_start:
            record("start", "time", time.perf_counter() - started, "s", 1)
        else:
            prefills = [(1, length) for length in args.prefill]
            decodes = [(batch, args.decode_context) for batch in args.decode]
            compile_used(engine.runner, prefills + decodes)

        def prompt(length: int) -> list[int]:
            return rng.integers(0, min(256, engine.vocab_size), length).tolist()

        def timed(prompts: list[list[int]], tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            begin = time.perf_counter()
            llm.generate(prompts, params, prefix_cache=FRESH)
            return time.perf_counter() - begin

        for length in args.prefill:
            timed([prompt(length)], 1)
            times = [timed([prompt(length)], 1) for _ in range(args.repeat)]
            record(f"prefill/{length}", "ttft", 1e3 * statistics.median(times), "ms", len(times))
        for batch in args.decode:
            # The difference of two runs leaves the decode steps alone, without the prefill.
            timed([prompt(args.decode_context) for _ in range(batch)], 2)
            spans = []
            for _ in range(args.repeat):
                prompts = [prompt(args.decode_context) for _ in range(batch)]
                short = timed(prompts, 2)
                spans.append((timed(prompts, 2 + args.decode_tokens) - short) / args.decode_tokens)
            record(f"decode/{batch}", "step", 1e3 * statistics.median(spans), "ms", len(spans))
