"""Suite `state-error`: how far a recovered state is from a cold prefill's, layer by layer.

Every prefix is cached afresh for every arm; a request then goes on by one token, and the state that
it leaves is compared to the one without a cache: relative RMS of each linear layer, averaged over
layers and prefixes. dasc-wr/W and anchored/W keep the same bytes and replay the same tokens.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import numpy as np

from jhybrid.config import require
from jhybrid.engine.build import engine_config
from jhybrid.engine.engine import Engine
from jhybrid.engine.llm import LLM
from jhybrid.engine.request import PrefixCacheOptions, PrefixCacheUsage, Request, SamplingParams
from jhybrid.models.groups import groups

from ..arms import Arm, engine_flags
from ..quality import add_quality_arguments
from ..results import Result, ResultsFile, read_results
from ..tasks.problem import Encoder
from ..tasks.wording import Wording
from .ruler import add_ruler_arguments, problems

DEFAULT_ARMS = (
    "dense,zero,dasc-nr/16,dasc-wr/16,anchored/16,dasc-nr/64,dasc-wr/64,anchored/64,"
    "dasc-nr/256,dasc-wr/256,anchored/256,tail-replay/0.05,tail-replay/0.1"
)
COLD = PrefixCacheOptions("off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_quality_arguments(parser, arms=DEFAULT_ARMS, replays=1)
    add_ruler_arguments(parser, tasks="niah_single_1", lengths="1024", samples=8)


def run(args: argparse.Namespace) -> None:
    arms: list[Arm] = args.arms
    for arm in arms:
        require(arm.intervention is None, "arms", arm.name, "recoveries, not interventions")
    common = vars(engine_config(args))
    flags = {arm.name: engine_flags(arm, common) for arm in arms}  # all are known to be good now
    results = ResultsFile(args.out)
    for arm in arms:
        with LLM(args.model, warm_up=False, **vars(flags[arm.name])) as llm:
            encoder = Encoder(llm.get_tokenizer(), chat=args.chat)
            found: dict[str, list[tuple[np.ndarray, PrefixCacheUsage]]] = defaultdict(list)
            for problem in problems(args, encoder, Wording(args.wording)):
                tokens = problem.prompt[: problem.boundary + 1]
                found[problem.case].append(recovered_error(llm.engine, tokens, arm))
            for case, errors in found.items():
                for metric, value, unit in _summary(llm.engine, errors):
                    results.append(
                        Result("state-error", case, arm.name, metric, value, unit, len(errors))
                    )
    text = table(read_results(args.out))
    (args.out / "summary.md").write_text(text)
    print(f"\n{text}")


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each case and arm, from records alone."""
    lines = ["# States after a recovery", "", "| case | arm | replayed | error | of each group |"]
    lines.append("|---|---|---|---|---|")
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        if r["suite"] == "state-error":
            rows.setdefault((r["case"], r["arm"]), {})[r["metric"]] = r["value"]
    for (case, arm), found in rows.items():
        of_groups = " ".join(f"{v:.4f}" for k, v in found.items() if "group" in k)
        error, replayed = found["state_error"], found["replayed"]
        lines.append(f"| {case} | {arm} | {replayed:g} | {error:.4f} | {of_groups} |")
    return "\n".join(lines) + "\n"


def recovered_error(
    engine: Engine, tokens: tuple[int, ...], arm: Arm
) -> tuple[np.ndarray, PrefixCacheUsage]:
    """Relative RMS error of each linear layer's state after `tokens`, all but the last cached."""
    expected, _ = state_after(engine, tokens, COLD)
    require(engine.flush_cache(), "engine", "busy", "an idle one")
    other = (tokens[-1] + 1) % engine.vocab_size
    state_after(engine, (*tokens[:-1], other), COLD)  # leaves a checkpoint before its last token
    found, usage = state_after(engine, tokens, PrefixCacheOptions(arm.recovery, arm.replay_ratio))
    require(engine.flush_cache(), "engine", "busy", "an idle one")
    axes = tuple(range(1, expected.ndim))
    error, size = (np.sum(x * x, axis=axes) for x in (found - expected, expected))
    return np.sqrt(error / size), usage


def state_after(
    engine: Engine, tokens: tuple[int, ...], options: PrefixCacheOptions
) -> tuple[np.ndarray, PrefixCacheUsage]:
    """The recurrent state [layer, ...] when exactly `tokens` have run, and what was reused."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add(Request("state", tokens, params, options))
    state, updates = None, list[Any]()
    while engine.has_work():
        updates += engine.step()
        for sequence in engine.scheduler.running:
            if sequence.pending and sequence.lease is not None:
                assert sequence.lease.state_depth == len(tokens)
                slot = engine.runner.caches.recurrent[sequence.lease.slot]
                state = np.asarray(slot, np.float64)
    assert state is not None
    return state, updates[0].prefix_cache


def _summary(
    engine: Engine, errors: list[tuple[np.ndarray, PrefixCacheUsage]]
) -> list[tuple[str, float, str]]:
    by_layer = np.mean([error for error, _ in errors], axis=0)
    of_groups = [
        (f"state_error_group_{n}", float(by_layer[list(group.linear)].mean()), "1")
        for n, group in enumerate(groups(engine.runner.config))
    ]
    tokens = [usage.replayed_tokens for _, usage in errors]
    return [
        ("state_error", float(by_layer.mean()), "1"),
        ("replayed", float(np.mean(tokens)), "tokens"),
        *of_groups,
    ]
