"""Suite `longbench`: narrativeqa, qasper, hotpotqa, musique and qmsum from local files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice

from ..flags import counts, names_of
from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from ..tasks.longbench import TASKS, load, problems
from ..tasks.problem import Encoder, Problem
from ..tasks.wording import Wording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_quality_arguments(parser, arms="dense,zero,tail-replay/0.05,tail-replay/0.1", replays=1)
    group = parser.add_argument_group("LongBench")
    group.add_argument("--tasks", type=names_of(TASKS), default=",".join(TASKS), metavar="TASK,...")
    group.add_argument(
        "--lengths", type=counts, default="16384", metavar="N,...", help="tokens of a prompt"
    )


def run(args: argparse.Namespace) -> None:
    def make(encoder: Encoder, wording: Wording, _: int) -> Iterator[Problem]:
        for length in args.lengths:
            for name in args.tasks:
                records = load(args.data, name)
                made = problems(records, name, encoder, wording, length, args.boundary)
                yield from (p.generating(args.max_new_tokens) for p in islice(made, args.limit))

    run_quality("longbench", args, make)
    write_report(args.out)
