"""From arms and problems to results: every arm over the same problems, then paired statistics."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jhybrid.config import require
from jhybrid.engine.arguments import add_engine_arguments, positive
from jhybrid.engine.build import engine_config
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.llm import LLM

from .arms import Arm, engine_flags, parse_arms, random_family, with_reference
from .probes import answer_nll, suffix_kl
from .protocol import ArmRun, Protocol, Residency, pooled_hit
from .results import Result, ResultsFile
from .scoring.answers import grader
from .scoring.statistics import estimate, mean_and_sample_sd, paired_difference
from .store import Record, Store
from .tasks.problem import Encoder, Problem
from .tasks.wording import Wording

Cases = Callable[[Problem], Iterable[str]]


@dataclass(frozen=True)
class Outcome:
    """A problem under one arm: the mean score of its replays, and what its probe found."""

    score: float
    records: list[Record]
    nll: float | None
    kl: list[float]  # at each suffix token, against the reference arm


def add_quality_arguments(
    parser: argparse.ArgumentParser, *, arms: str, replays: int, boundary: str = "context"
) -> None:
    add_engine_arguments(parser)
    group = parser.add_argument_group("suite")
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="also resumes from it"
    )
    group.add_argument("--arms", default=arms, metavar="ARM,...", help=f"(default: {arms})")
    group.add_argument("--data", type=Path, metavar="DIR", help="where files not shipped are")
    group.add_argument(
        "--wording", default="ruler", metavar="SET", help="ruler, plain, or a folder of templates"
    )
    group.add_argument("--chat", action="store_true", help="prompts as the user's turn")
    group.add_argument("--replays", type=positive, default=replays, metavar="R")
    group.add_argument("--limit", type=positive, metavar="N", help="problems of a case at most")
    group.add_argument("--run-seed", type=int, default=0, metavar="N", help="of the sampler")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument(
        "--boundary",
        choices=("context", "question"),
        default=boundary,
        help=f"where the cached prefix ends (default: {boundary})",
    )
    group.add_argument("--block", type=positive, metavar="N", help="problems warmed together")
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help="of every task")
    group.add_argument("--no-probe", action="store_true", help="no suffix KL, no answer likelihood")
    group.add_argument(
        "--controlled", action="store_true", help="demand residency: no eviction, hits, free slots"
    )


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
    arms = with_reference(parse_arms(args.arms))
    common = vars(engine_config(args))
    flags = {arm.name: engine_flags(arm, common) for arm in arms}  # all are known to be good now
    protocol = protocol_of(args)
    stores = Store(args.out, "outputs"), Store(args.out, "probes")
    settings = {"model": args.model, "dtype": args.dtype, "chat": args.chat}
    problems: list[Problem] = []
    outcomes: dict[str, dict[str, Outcome]] = {}
    reference: dict[str, Record | None] = {}
    for config, group in _by_engine(arms, flags):
        with LLM(args.model, **vars(config)) as llm:
            if not problems:
                encoder = Encoder(llm.get_tokenizer(), chat=args.chat)
                made = make(encoder, Wording(args.wording), llm.engine.max_context)
                problems = _checked(list(made), llm.engine.max_context)
            for arm in group:
                run = ArmRun(llm, arm, suite, protocol, *stores, settings)
                run.run(problems)
                if arm is arms[0]:
                    reference = {_id(p): run.probe(p) for p in problems}
                outcomes[arm.name] = {_id(p): _outcome(run, p, reference) for p in problems}
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


def _checked(problems: list[Problem], max_context: int) -> list[Problem]:
    require(len(problems) > 0, "problems", 0, "one at least")
    ids = [_id(p) for p in problems]
    twice = next((i for i in ids if ids.count(i) > 1), None) if len(set(ids)) < len(ids) else None
    require(twice is None, "problem", twice, "an id of its own")
    for p in problems:
        total = len(p.prompt) + p.max_tokens
        fits = total <= max_context
        require(fits, f"{p.case}/{p.id}", f"{total} tokens", f"at most max_context {max_context}")
    return problems


def _id(problem: Problem) -> str:
    return f"{problem.case}/{problem.id}"


def _outcome(run: ArmRun, problem: Problem, reference: dict[str, Record | None]) -> Outcome:
    records, probe, other = run.records(problem), run.probe(problem), reference.get(_id(problem))
    return Outcome(
        score=float(np.mean([r["score"] for r in records])),
        records=records,
        nll=answer_nll(probe) if probe else None,
        kl=suffix_kl(other, probe) if probe and other else [],
    )


def write_results(
    results: ResultsFile,
    suite: str,
    problems: Sequence[Problem],
    outcomes: dict[str, dict[str, Outcome]],
    cases: Cases,
) -> None:
    """All figures of all cases: by arm, against the first arm, and over random masks."""
    members: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        for case in cases(problem):
            members[case].append(_id(problem))
    for case, ids in members.items():
        families: dict[str, list[tuple[float, float]]] = defaultdict(list)
        base = [next(iter(outcomes.values()))[i] for i in ids]
        for arm, found in outcomes.items():
            own = [found[i] for i in ids]
            for metric, value, unit, n in _figures(own, None if own == base else base):
                results.append(Result(suite, case, arm, metric, value, unit, n))
            family = random_family(arm)
            if family is not None:
                kl = [float(np.mean(o.kl)) for o in own if o.kl]
                mean_kl = float(np.mean(kl)) if kl else float("nan")
                families[family].append((float(np.mean([o.score for o in own])), mean_kl))
        for family, values in families.items():
            scores, kls = zip(*values, strict=True)
            for metric, numbers, unit in (("score", scores, "score"), ("kl", kls, "nat")):
                mean, sd = mean_and_sample_sd(numbers)
                if not np.isnan(mean):
                    results.append(Result(suite, case, family, metric, mean, unit, len(values)))
                    results.append(
                        Result(suite, case, family, f"{metric}_sd", sd, unit, len(values))
                    )


def _figures(own: list[Outcome], base: list[Outcome] | None) -> list[tuple[str, float, str, int]]:
    """(metric, value, unit, n) of one arm on one case."""
    score = estimate([o.score for o in own])
    records = [r for o in own for r in o.records]
    loaded = [r for r in records if r["restored"] > 0 or r["cached"] > 0]
    asked = [r for r in loaded if r["recovery"] == r["asked"]]
    out = [
        ("score", score.mean, "score", score.n),
        ("score_se", score.error, "score", score.n),
        ("hit", pooled_hit(records), "ratio", len(records)),
        ("loaded", len(loaded) / len(records), "ratio", len(records)),
        ("as_asked", len(asked) / len(records), "ratio", len(records)),
        ("replayed", float(np.mean([r["replayed"] for r in records])), "token", len(records)),
    ]
    if base is not None:
        paired = paired_difference([o.score for o in own], [o.score for o in base])
        out += [
            ("score_delta", paired.mean, "score", paired.n),
            ("score_delta_se", paired.error, "score", paired.n),
            ("score_delta_low", paired.low, "score", paired.n),
            ("score_delta_high", paired.high, "score", paired.n),
        ]
    nlls = [o.nll for o in own if o.nll is not None]
    if nlls:
        out.append(("nll", float(np.mean(nlls)), "nat/token", len(nlls)))
    if base is not None and len(nlls) == len(own):
        found = paired_difference(nlls, [b.nll if b.nll is not None else np.nan for b in base])
        out.append(("nll_delta", found.mean, "nat/token", found.n))
        out.append(("nll_delta_se", found.error, "nat/token", found.n))
    kls = [o.kl for o in own if o.kl] if base is not None else []
    if kls:
        mean = estimate([float(np.mean(values)) for values in kls])
        out.append(("kl", mean.mean, "nat", mean.n))
        out.append(("kl_se", mean.error, "nat", mean.n))
        for position in (1, 2, 4, 8, 16, 32):
            there = [values[position - 1] for values in kls if len(values) >= position]
            if there:
                out.append((f"kl@{position}", float(np.mean(there)), "nat", len(there)))
    return out
