"""Suite `choice`: MMLU-Pro and GPQA-Diamond, from the user's files.

An answer without a letter scores 0 in every arm, where MMLU-Pro's own program would guess.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice

from ..flags import names_of
from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from ..tasks.choice import gpqa, mmlu_pro
from ..tasks.problem import Encoder, Problem
from ..tasks.wording import Wording

TASKS = ("mmlu_pro", "gpqa")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arms = "dense,dasc-nr/16,random/16"
    add_quality_arguments(parser, arms=arms, replays=7, boundary="question")
    parser.set_defaults(temperature=1.0)
    group = parser.add_argument_group("choice")
    group.add_argument("--tasks", type=names_of(TASKS), default=",".join(TASKS), metavar="TASK,...")
    group.add_argument("--shots", type=int, default=0, metavar="N", help="examples (MMLU-Pro)")


def run(args: argparse.Namespace) -> None:
    def make(encoder: Encoder, wording: Wording, max_context: int) -> Iterator[Problem]:
        for name in args.tasks:
            if name == "gpqa":
                made = gpqa(args.data, encoder, wording, args.boundary)
            else:
                options = {"shots": args.shots, "max_length": max_context}
                made = mmlu_pro(args.data, encoder, wording, **options, boundary=args.boundary)
            yield from (p.generating(args.max_new_tokens) for p in islice(made, args.limit))

    run_quality("choice", args, make, _cases)
    write_report(args.out)


def _cases(problem: Problem) -> Iterator[str]:
    yield problem.case
    if problem.tags["category"]:
        yield f"{problem.case}/{problem.tags['category']}"
