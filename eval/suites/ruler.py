"""Suite `ruler`: all 13 RULER subtasks and the order tasks, at any length."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from jhybrid.engine.arguments import positive

from ..flags import counts, names_of
from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from ..tasks.problem import Encoder, Problem
from ..tasks.ruler import EXTRA_TASKS, SUBTASKS, Ruler
from ..tasks.wording import Wording
from ..tasks.words import load_words

ALL = (*SUBTASKS, *EXTRA_TASKS)
DEFAULT_ARMS = "dense,dasc-nr/16,dasc-nr/64,dasc-nr/128,dasc-nr/512,dasc-nr/1024"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_quality_arguments(parser, arms=DEFAULT_ARMS, replays=3)
    add_ruler_arguments(parser, tasks=",".join(SUBTASKS), lengths="4096,8192,16384", samples=30)


def add_ruler_arguments(
    parser: argparse.ArgumentParser, *, tasks: str, lengths: str, samples: int
) -> None:
    group = parser.add_argument_group("RULER")
    group.add_argument(
        "--tasks",
        type=names_of(ALL),
        default=tasks,
        metavar="TASK,...",
        help=f"of {', '.join(ALL)}",
    )
    group.add_argument(
        "--lengths", type=counts, default=lengths, metavar="N,...", help="prompt plus output"
    )
    group.add_argument(
        "--samples", type=positive, default=samples, metavar="N", help="of each cell"
    )
    group.add_argument("--task-seed", type=int, default=42, metavar="N", help="of the generators")
    group.add_argument(
        "--words", default="bundled", metavar="LIST", help="bundled, wonderwords, or a JSON file"
    )


def ruler_of(args: argparse.Namespace, encoder: Encoder, wording: Wording) -> Ruler:
    words = load_words(args.words)
    return Ruler(encoder, wording, words, args.data, args.task_seed, args.max_new_tokens)


def problems(args: argparse.Namespace, encoder: Encoder, wording: Wording) -> Iterator[Problem]:
    ruler = ruler_of(args, encoder, wording)
    for length in args.lengths:
        for task in args.tasks:
            yield from ruler.problems(task, length, args.samples, args.boundary)


def run(args: argparse.Namespace) -> None:
    run_quality("ruler", args, lambda encoder, wording, _: problems(args, encoder, wording))
    write_report(args.out)
