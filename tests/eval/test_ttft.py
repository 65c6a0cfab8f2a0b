"""Suite `ttft`: its arms, and the report that is made from records alone."""

from __future__ import annotations

from pathlib import Path

from jhybrid.eval.results import Result, ResultsFile
from jhybrid.eval.ttft import arms
from jhybrid.eval.ttft_report import write_report


def test_arms_cover_both_places_and_both_orders() -> None:
    assert [arm.name for arm in arms([0.05, 0.1])] == [
        "full_prefill",
        "dense/device",
        "dense/host",
        "anchored/1/device",
        "tail-replay/0.05/device",
        "tail-replay/0.1/device",
        "tail-replay/0.05/serial",
        "tail-replay/0.05/overlap+skip",
        "tail-replay/0.1/serial",
        "tail-replay/0.1/overlap+skip",
    ]


def test_the_table_gives_times_and_what_they_save(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    for length, arm, value in ((100, "full_prefill", 80.0), (100, "dense/device", 8.0)):
        results.append(Result("ttft", f"demo/{length}", arm, "ttft", value, "ms", 3))
    results.append(Result("ttft", "demo/200", "full_prefill", "ttft", 160.0, "ms", 3))
    results.append(Result("ttft", "demo/200", "full_prefill", "replayed", 5, "tokens", 1))
    write_report(tmp_path)
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert "| demo/100 | 80.0 (1.0x) | 8.0 (10.0x) |" in lines
    assert "| demo/200 | 160.0 (1.0x) | - |" in lines
