"""Controlled runs: suites `intervention`, `retention-curve`, `replay-curve`; `quality` is all.

    intervention      which component of the cached prefix a task needs (dasc Table 1a)
    retention-curve   quality against w_max: dasc-nr, -wr, anchored, INT8, random and inverse masks
    replay-curve      quality against the replay ratio, from zero-only to the full prefill

`quality` asks the problems of one set once for all of them, and measures horizons (Table 1b).
Tasks of a single needle have it at the depths of `--depths`, as many problems at each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jhybrid.engine.arguments import positive
from jhybrid.engine.build import LoadedModel, engine_config, load_model, warn_unread
from jhybrid.engine.config import EngineConfig
from jhybrid.retention.selection import SHORTEST_REPLAY

from ..arms import parse_arms, with_reference
from ..controlled.run import run_controlled
from ..flags import arm_list, listed, share
from ..outcome import write_results
from ..quality import add_problem_arguments, checked
from ..report import write_report
from ..results import ResultsFile
from ..tasks.niah import NEEDLES
from ..tasks.problem import Encoder, Problem
from ..tasks.wording import Wording
from .horizons import draw_horizons, measure_horizons
from .ruler import add_ruler_arguments, ruler_of

DEPTHS = (0, 25, 50, 75, 100)
CURVE_TASKS = "niah_single_1,niah_multikey_1,niah_multivalue,vt,cwe,last_write"
QUALITY_TASKS = (
    "niah_single_1,niah_single_2,niah_multikey_1,niah_multivalue,niah_multiquery,vt,cwe,fwe,"
    "last_write"
)
READ = ("tp", "dtype", "a_s", "compilation_cache", "max_context", "max_running") + (
    "max_prefill_tokens",
    "page_size",
)
WINDOW = 64  # w_max of the horizons' figures


@dataclass(frozen=True)
class Part:
    """Arms of a suite; those with braces stand for one at every value of `parameter`, a flag that
    takes a list of what `item` reads and `expected` describes."""

    name: str
    fixed: str
    templates: str = ""
    parameter: str = ""
    values: str = ""
    item: Callable[[str], Any] = str
    expected: str = ""

    def arms(self, templates: str, values: Sequence[str]) -> str:
        """The fixed arms, and at each value those of `templates`; every name once."""
        filled = [t.format(v) for v in values for t in templates.split(",") if t]
        return ",".join(dict.fromkeys([*self.fixed.split(","), *filled]))

    def templates_of(self, text: str) -> str:
        """The type of `--arms`: the same, if its names are arms once they are filled."""
        try:
            arm_list(",".join(t.format(self.values.split(",")[0]) for t in text.split(",")))
        except (argparse.ArgumentTypeError, LookupError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{error}, from {text!r}") from None
        return text

    def value(self, text: str) -> str:
        """One of `parameter`'s, as it was written: names of arms have it like that."""
        self.item(text)
        return text


def window(text: str) -> int:
    value = int(text)
    if value < SHORTEST_REPLAY:
        raise ValueError(f"window must be at least {SHORTEST_REPLAY}, got {text}")
    return value


INTERVENTION = Part(
    "intervention", "baseline,zero-full-kv,mask-full-kv,zero-linear,zero-both,mask-both"
)
RETENTION = Part(
    "retention-curve",
    "dense",
    "dasc-nr/{},dasc-wr/{},anchored/{},dasc-nr/{}/int8,random/{},inverse/{}",
    "curve-windows",
    "16,64,256,1024",
    window,
    f"whole numbers of at least {SHORTEST_REPLAY}",
)
REPLAY = Part(
    "replay-curve",
    "dense,off,zero",
    "tail-replay/{}",
    "curve-ratios",
    "0.01,0.02,0.05,0.1,0.25,1",
    share,
    "numbers above 0 and up to 1",
)


def percent(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 100:
        raise ValueError(f"percent must be from 0 to 100, got {text}")
    return value


@dataclass(frozen=True)
class Controlled:
    """A suite: its parts share problems, prefixes and programs."""

    parts: tuple[Part, ...]
    tasks: str
    help: str
    horizons: bool = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        group = add_problem_arguments(parser)
        if len(self.parts) == 1:  # of several, each has its own
            part = self.parts[0]
            default = part.templates or part.fixed
            group.add_argument(
                "--arms",
                type=part.templates_of,
                default=default,
                metavar="ARM,...",
                help=f"(default: {default})",
            )
        add_ruler_arguments(parser, tasks=self.tasks, lengths="4096", samples=100)
        parser.add_argument(
            "--depths",
            type=listed(percent, "whole numbers from 0 to 100"),
            default=",".join(map(str, DEPTHS)),
            metavar="PERCENT,...",
        )
        for part in self.parts:
            if part.parameter:
                parser.add_argument(
                    f"--{part.parameter}",
                    type=listed(part.value, part.expected),
                    default=part.values,
                    metavar="X,...",
                    help=f"fill the braces of arms (default: {part.values})",
                )
        if self.horizons:
            parser.add_argument(
                "--prefixes",
                type=positive,
                default=8,
                metavar="N",
                help="of each length, for horizons",
            )
        parser.set_defaults(max_running=256, max_prefill_tokens=32768)

    def run(self, args: argparse.Namespace) -> None:
        warn_unread(args, READ)
        engine = engine_config(args)
        model = load_model(args.model, engine)
        encoder = Encoder(model.tokenizer, chat=args.chat)
        longest = args.max_context or model.config.max_context
        problems = checked(list(_problems(args, encoder)), longest)
        wanted = {part.name: self._arms(part, args) for part in self.parts}
        arms = with_reference(parse_arms(",".join(wanted.values()).replace("baseline", "dense")))
        found = run_controlled(model, engine, encoder, arms, problems, args.out)
        results = ResultsFile(args.out)
        for name, names in wanted.items():
            own = {
                arm.name: found["dense" if arm.name == "baseline" else arm.name]
                for arm in with_reference(parse_arms(names))
            }
            write_results(results, name, problems, own, _CASES.get(name, _by_case))
        if self.horizons:
            _horizons(args, model, engine, encoder, results)
        write_report(args.out)

    def _arms(self, part: Part, args: argparse.Namespace) -> str:
        given = args.arms if len(self.parts) == 1 else part.templates
        if not part.parameter:
            return given or part.fixed
        return part.arms(given, getattr(args, part.parameter.replace("-", "_")))


def _problems(args: argparse.Namespace, encoder: Encoder) -> Iterator[Problem]:
    """`samples` of every task and length; those of a single needle in equal parts at the depths."""
    ruler = ruler_of(args, encoder, Wording(args.wording))
    depths = tuple(args.depths)
    each = -(-args.samples // len(depths))
    for length in args.lengths:
        for task in args.tasks:
            needle = NEEDLES.get(task)
            if needle is not None and needle.keys * needle.values == 1:
                yield from ruler.at_depths(task, length, each, depths, args.boundary)
            else:
                yield from ruler.problems(task, length, args.samples, args.boundary)


def _by_case(problem: Problem) -> Sequence[str]:
    return (problem.case,)


def _by_depth(problem: Problem) -> Iterator[str]:
    yield problem.case
    if "depth" in problem.tags:
        yield f"{problem.case}/depth-{problem.tags['depth']}"


_CASES = {"intervention": _by_depth}


def _horizons(
    args: argparse.Namespace,
    model: LoadedModel,
    engine: EngineConfig,
    encoder: Encoder,
    results: ResultsFile,
) -> None:
    """On essays, of the lengths asked for and of a quarter of the shortest."""
    lengths = sorted(args.lengths, reverse=True)
    lengths.append(lengths[-1] // 4)
    measure_horizons(model, engine, encoder, args.data, "essays", lengths, args.prefixes, results)
    draw_horizons(model, engine, WINDOW, args.out)


SUITES = {
    "intervention": Controlled(
        (INTERVENTION,), "niah_single_1", "components of the cached prefix set to zero"
    ),
    "retention-curve": Controlled((RETENTION,), CURVE_TASKS, "quality against w_max"),
    "replay-curve": Controlled((REPLAY,), CURVE_TASKS, "quality against the replay ratio"),
    "quality": Controlled(
        (INTERVENTION, RETENTION, REPLAY),
        QUALITY_TASKS,
        "intervention, retention-curve, replay-curve and horizons of one set of problems",
        horizons=True,
    ),
}
