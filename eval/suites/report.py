"""Suite `report`: results of one or more models side by side, with what the papers claim.

Every folder gets its own summary.md and figures anew; --out gets models.md with the findings.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jhybrid.config import require

from ..report import write_report
from ..report.claims import claims
from ..results import read_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of results")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")


def run(args: argparse.Namespace) -> None:
    names = [folder.name for folder in args.folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, "DIR", twice, "folders of different names")
    models = {folder.name: read_results(folder) for folder in args.folders}
    for folder in args.folders:
        write_report(folder)
    places = [os.path.relpath(folder, args.out) for folder in args.folders]
    links = "\n".join(f"* [{n}]({at}/summary.md)" for n, at in zip(names, places, strict=True))
    text = f"# Findings\n\n{claims(models)}\n\nTables and figures:\n\n{links}\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "models.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{args.out / 'models.md'}")
