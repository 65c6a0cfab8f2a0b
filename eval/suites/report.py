"""Suite `report`: results of one or more models side by side, with what the papers claim.

Every folder gets its own summary.md and figures anew; --out gets models.md with the findings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report import write_report
from ..report.claims import claims
from ..results import read_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of results")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")


def run(args: argparse.Namespace) -> None:
    models = {folder.name: read_results(folder) for folder in args.folders}
    for folder in args.folders:
        write_report(folder)
    links = "\n".join(f"* [{f.name}]({f.name}/summary.md)" for f in args.folders)
    text = f"# Findings\n\n{claims(models)}\n\nTables and figures:\n\n{links}\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "models.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{args.out / 'models.md'}")
