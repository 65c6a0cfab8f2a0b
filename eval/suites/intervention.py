"""Suite `intervention`: which component of the cached prefix a task needs (dasc Table 1a).

zero-linear zeroes the recurrent states and the conv windows of the checkpoints; zero-full-kv writes
zeros into keys and values, so that a zeroed key has logit 0 and stays in the softmax.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from ..tasks.niah import NEEDLES
from ..tasks.problem import Encoder, Problem
from ..tasks.wording import Wording
from .ruler import add_ruler_arguments, ruler_of

DEPTHS = (0, 25, 50, 75, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arms = "baseline,zero-full-kv,zero-linear,zero-both"
    add_quality_arguments(parser, arms=arms, replays=1)
    add_ruler_arguments(parser, tasks="niah_single_1", lengths="4096", samples=100)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), metavar="PERCENT,...")


def run(args: argparse.Namespace) -> None:
    depths = tuple(map(int, args.depths.split(",")))

    def make(encoder: Encoder, wording: Wording, _: int) -> Iterator[Problem]:
        ruler = ruler_of(args, encoder, wording)
        for length in map(int, args.lengths.split(",")):
            for task in args.tasks.split(","):
                needle = NEEDLES.get(task)
                if needle is not None and needle.keys * needle.values == 1:
                    yield from ruler.at_depths(task, length, args.samples, depths, args.boundary)
                else:
                    yield from ruler.problems(task, length, args.samples, args.boundary)

    run_quality("intervention", args, make, _cases)
    write_report(args.out)


def _cases(problem: Problem) -> Iterator[str]:
    yield problem.case
    if "depth" in problem.tags:
        yield f"{problem.case}/depth-{problem.tags['depth']}"
