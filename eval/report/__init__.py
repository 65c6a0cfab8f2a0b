"""Reports made from result records alone: `summary.md`, and figures where matplotlib is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..results import read_results
from .summary import summary


def write_report(folder: Path) -> None:
    """summary.md and PNG figures of DIR/results.jsonl, beside it; other figures there are shown."""
    records = read_results(folder)
    if importlib.util.find_spec("matplotlib"):
        from .figures import write_figures

        write_figures(records, folder)
    else:
        print("no figures: matplotlib is part of the extra `eval`")
    text = summary(records, sorted(path.name for path in folder.glob("*.png")))
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{folder / 'summary.md'}")
