"""From arms and problems to results: every arm over the same problems, then paired statistics."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from jhybrid.config import require
from jhybrid.engine.arguments import add_engine_arguments, positive
from jhybrid.engine.build import engine_config
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.llm import LLM

from .arms import Arm, engine_flags, with_reference
from .flags import arm_list
from .outcome import KL_POSITIONS, Cases, Outcome, Outcomes, problem_id, write_results
from .probes import answer_nll, suffix_kl
from .protocol import ArmRun, Protocol, Residency
from .results import ResultsFile
from .scoring.answers import grader
from .store import Record, Store
from .tasks.problem import Encoder, Problem
from .tasks.wording import Wording


def add_quality_arguments(
    parser: argparse.ArgumentParser, *, arms: str, replays: int, boundary: str = "context"
) -> None:
    group = add_problem_arguments(parser, boundary=boundary)
    group.add_argument(
        "--arms", type=arm_list, default=arms, metavar="ARM,...", help=f"(default: {arms})"
    )
    group = parser.add_argument_group("protocol")
    group.add_argument("--replays", type=positive, default=replays, metavar="R")
    group.add_argument("--limit", type=positive, metavar="N", help="problems of a case at most")
    group.add_argument("--run-seed", type=int, default=0, metavar="N", help="of the sampler")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--block", type=positive, metavar="N", help="problems warmed together")
    group.add_argument("--no-probe", action="store_true", help="no suffix KL, no answer likelihood")
    group.add_argument(
        "--controlled", action="store_true", help="demand residency: no eviction, hits, free slots"
    )


def add_problem_arguments(
    parser: argparse.ArgumentParser, *, boundary: str = "context"
) -> argparse._ArgumentGroup:
    """Of every suite that asks a model questions. Returns the group, for the suite's arms."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("suite")
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="also resumes from it"
    )
    group.add_argument("--data", type=Path, metavar="DIR", help="where files not shipped are")
    group.add_argument(
        "--wording", default="ruler", metavar="SET", help="ruler, plain, or a folder of templates"
    )
    group.add_argument("--chat", action="store_true", help="prompts as the user's turn")
    group.add_argument(
        "--boundary",
        choices=("context", "question"),
        default=boundary,
        help=f"where the cached prefix ends (default: {boundary})",
    )
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help="of every task")
    return group


def protocol_of(args: argparse.Namespace) -> Protocol:
    return Protocol(
        replays=args.replays,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.run_seed,
        block=args.block,
        probe=not args.no_probe,
        residency=Residency() if args.controlled else None,
    )


def run_quality(
    suite: str,
    args: argparse.Namespace,
    make: Callable[[Encoder, Wording, int], Iterable[Problem]],
    cases: Cases = lambda problem: (problem.case,),
) -> ResultsFile:
    """Run all arms of `args` over what `make` (encoder, wording, longest context) gives."""
    arms = with_reference(args.arms)
    common = vars(engine_config(args))
    flags = {arm.name: engine_flags(arm, common) for arm in arms}  # all are known to be good now
    protocol = protocol_of(args)
    stores = Store(args.out, "outputs"), Store(args.out, "probes")
    settings = {"model": args.model, "dtype": args.dtype, "chat": args.chat}
    problems: list[Problem] = []
    outcomes: Outcomes = {}
    reference: dict[str, Record | None] = {}
    for config, group in _by_engine(arms, flags):
        with LLM(args.model, warm_up=False, **vars(config)) as llm:
            if not problems:
                encoder = Encoder(llm.get_tokenizer(), chat=args.chat)
                made = make(encoder, Wording(args.wording), llm.engine.max_context)
                problems = checked(list(made), llm.engine.max_context)
            for arm in group:
                run = ArmRun(llm, arm, suite, protocol, *stores, settings)
                run.run(problems)
                if arm is arms[0]:
                    reference = {problem_id(p): run.probe(p) for p in problems}
                outcomes[arm.name] = {problem_id(p): _outcome(run, p, reference) for p in problems}
    results = ResultsFile(args.out)
    write_results(results, suite, problems, outcomes, cases)
    if any(p.scorer == "math" for p in problems) and grader() == "text":
        print("closed forms were compared as text: install the extra `eval` for math-verify")
    return results


def _by_engine(
    arms: Sequence[Arm], flags: dict[str, EngineConfig]
) -> list[tuple[EngineConfig, list[Arm]]]:
    """Arms with equal flags together; the engine of the reference comes first."""
    groups: dict[EngineConfig, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(flags[arm.name], []).append(arm)
    return list(groups.items())


def checked(problems: list[Problem], max_context: int) -> list[Problem]:
    """The same; ValueError where an id is not its problem's own, or a problem is too long."""
    require(len(problems) > 0, "problems", 0, "one at least")
    ids = [problem_id(p) for p in problems]
    twice = next((i for i in ids if ids.count(i) > 1), None) if len(set(ids)) < len(ids) else None
    require(twice is None, "problem", twice, "an id of its own")
    for p in problems:
        total = len(p.prompt) + p.max_tokens
        fits = total <= max_context
        require(fits, f"{p.case}/{p.id}", f"{total} tokens", f"at most max_context {max_context}")
    return problems


def _outcome(run: ArmRun, problem: Problem, reference: dict[str, Record | None]) -> Outcome:
    records, probe = run.records(problem), run.probe(problem)
    other = reference.get(problem_id(problem))
    kl = suffix_kl(other, probe) if probe and other else []
    return Outcome(
        score=float(np.mean([r["score"] for r in records])),
        records=records,
        nll=answer_nll(probe) if probe else None,
        kl=float(np.mean(kl)) if kl else None,
        kl_at={n: kl[n - 1] for n in KL_POSITIONS if n <= len(kl)},
    )
