"""python -m jhybrid.eval SUITE: measure, and write results.jsonl."""

from __future__ import annotations

import argparse
from types import ModuleType

from . import kernels, matmul_variants, model, retention_load, step_profile, ttft

SUITES: dict[str, ModuleType] = {
    "kernels": kernels,
    "model": model,
    "retention-load": retention_load,
    "profile": step_profile,
    "matmul-variants": matmul_variants,
    "ttft": ttft,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jhybrid.eval", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, module in SUITES.items():
        module.add_arguments(suites.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    args = parser.parse_args()
    try:
        SUITES[args.suite].run(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
