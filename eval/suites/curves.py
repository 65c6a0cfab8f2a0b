"""Suites `retention-curve` and `replay-curve`: quality against w_max, and against the replay ratio.

`retention-curve` runs dasc-nr and -wr, anchored, INT8, random masks of equal count and, as a
positive control, the inverse mask at every w_max. `replay-curve` runs tail-replay at every ratio
between zero-only and the full prefill.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ..quality import add_quality_arguments, run_quality
from ..report import write_report
from .ruler import add_ruler_arguments, problems

TASKS = "niah_single_1,niah_multikey_1,niah_multivalue,vt,cwe,last_write"


@dataclass(frozen=True)
class Curve:
    """A suite whose arms are templates, each filled with every value of one parameter."""

    name: str
    parameter: str
    values: str
    templates: str
    fixed: str
    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_quality_arguments(parser, arms=self.templates, replays=1)
        add_ruler_arguments(parser, tasks=TASKS, lengths="4096", samples=100)
        flag = f"--{self.parameter.replace('_', '-')}s"
        parser.add_argument(
            flag,
            dest="values",
            default=self.values,
            metavar="X,...",
            help=f"fill the braces of --arms (default: {self.values})",
        )

    def run(self, args: argparse.Namespace) -> None:
        templates, values = args.arms.split(","), args.values.split(",")
        filled = [t.format(v) for v in values for t in templates]
        args.arms = ",".join(dict.fromkeys([*self.fixed.split(","), *filled]))
        run_quality(self.name, args, lambda encoder, wording, _: problems(args, encoder, wording))
        write_report(args.out)


RETENTION = Curve(
    "retention-curve",
    "curve_window",
    "16,64,128,512,1024",
    "dasc-nr/{},dasc-wr/{},anchored/{},dasc-nr/{}/int8,random/{},inverse/{}",
    "dense",
    "quality against w_max: dasc-nr, -wr, anchored, INT8, random and inverse masks",
)
REPLAY = Curve(
    "replay-curve",
    "curve_ratio",
    "0.01,0.02,0.05,0.1,0.25,1",
    "tail-replay/{}",
    "dense,off,zero",
    "quality against the replay ratio, from zero-only to the full prefill",
)
