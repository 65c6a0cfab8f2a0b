"""Suite `math`: AIME, HMMT and IMO-AnswerBench, graded by math-verify where it is installed.

Answers in words need a judge; the case `imo/gradable` leaves them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice

from ..flags import names_of
from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from ..tasks.mathematics import TASKS, problems
from ..tasks.problem import Encoder, Problem
from ..tasks.wording import Wording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arms = "dense,dasc-nr/16,random/16"
    add_quality_arguments(parser, arms=arms, replays=3, boundary="question")
    parser.set_defaults(temperature=1.0)
    group = parser.add_argument_group("mathematics")
    group.add_argument("--tasks", type=names_of(TASKS), default=",".join(TASKS), metavar="TASK,...")


def run(args: argparse.Namespace) -> None:
    def make(encoder: Encoder, wording: Wording, _: int) -> Iterator[Problem]:
        for name in args.tasks:
            made = problems(args.data, name, encoder, wording, args.boundary)
            yield from (p.generating(args.max_new_tokens) for p in islice(made, args.limit))

    run_quality("math", args, make, _cases)
    write_report(args.out)


def _cases(problem: Problem) -> Iterator[str]:
    yield problem.case
    if not problem.tags["judge"]:
        yield f"{problem.case}/gradable"
