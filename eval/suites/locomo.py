"""Suite `locomo`: 1,986 questions on ten conversations, by ordinary token F1 in all categories.

Category 5 has no gold answer for 444 of its 446 questions: it is scored against
`adversarial_answer`, and the case `locomo/without-5` leaves it out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from ..tasks.locomo import ADVERSARIAL, load, problems
from ..tasks.problem import Encoder, Problem
from ..tasks.wording import Wording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_quality_arguments(parser, arms="dense,dasc-nr/16,random/16", replays=1)
    group = parser.add_argument_group("LoCoMo")
    group.add_argument("--conversations", type=int, metavar="N", help="the first N of them")
    group.add_argument("--max-length", type=int, metavar="N", help="of a prompt plus its output")


def run(args: argparse.Namespace) -> None:
    def make(encoder: Encoder, wording: Wording, max_context: int) -> Iterator[Problem]:
        conversations = load(args.data)[: args.conversations]
        for conversation in conversations:
            conversation["qa"] = conversation["qa"][: args.limit]
        length = args.max_length or max_context
        for problem in problems(conversations, encoder, wording, length, args.boundary):
            yield problem.generating(args.max_new_tokens)

    run_quality("locomo", args, make, _cases)
    write_report(args.out)


def _cases(problem: Problem) -> Iterator[str]:
    category = problem.tags["category"]
    yield "locomo"
    yield f"locomo/category-{category}"
    if category != ADVERSARIAL:
        yield "locomo/without-5"
