"""python -m jhybrid.eval SUITE: measure, and write results.jsonl, summary.md and figures."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from . import checkpoint_moves, engine_moves, kernels, model, retention_load, step_profile, ttft
from .suites import (
    choice,
    controlled,
    horizons,
    locomo,
    longbench,
    mathematics,
    report,
    ruler,
    state_error,
    trace,
)


class Suite(Protocol):
    """A module, or an object like one. The first line of its docstring is its help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> None: ...


SUITES: dict[str, Suite] = {
    "kernels": kernels,
    "model": model,
    "profile": step_profile,
    "retention-load": retention_load,
    "checkpoint-moves": checkpoint_moves,
    "engine-moves": engine_moves,
    "ttft": ttft,
    "ruler": ruler,
    "longbench": longbench,
    "locomo": locomo,
    "choice": choice,
    "math": mathematics,
    **controlled.SUITES,
    "state-error": state_error,
    "horizons": horizons,
    "trace": trace,
    "report": report,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jhybrid.eval", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, suite in SUITES.items():
        text: Any = getattr(suite, "help", None) or suite.__doc__
        suite.add_arguments(suites.add_parser(name, help=text.splitlines()[0]))
    args = parser.parse_args(argv)
    try:
        SUITES[args.suite].run(args)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
