"""Tables and figures from records alone."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from jhybrid.eval.report import write_report
from jhybrid.eval.report.claims import claims, findings, sign_test
from jhybrid.eval.report.frame import Frame, number, table, with_error
from jhybrid.eval.report.summary import summary
from jhybrid.eval.results import Result, ResultsFile, command_line, read_results

ORIGIN = {"commit": "abc", "versions": {"jax": "1"}, "device": "cpu", "command": "python -m x"}


def record(
    suite: str, case: str, arm: str, metric: str, value: float, n: int = 3
) -> dict[str, Any]:
    names = {"suite": suite, "case": case, "arm": arm, "metric": metric}
    return {**names, "value": value, "unit": "u", "n": n, **ORIGIN}


def test_numbers():
    assert [number(x) for x in (None, float("nan"), 0.0, 1 / 3, 2e-5)] == [
        "-",
        "-",
        "0.000",
        "0.333",
        "2.0e-05",
    ]
    assert with_error(0.5, 0.1, 1) == "0.5 ± 0.1" and with_error(0.5, None, 1) == "0.5"
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_a_command_names_no_folder_of_this_machine() -> None:
    before, after = ["model", "demo", "--out"], ["--prefill", "8,16"]
    wanted = "model demo --out OUT --prefill 8,16"
    assert command_line([*before, "/home/me/x y", *after]) == wanted
    assert command_line([*before[:2], "--out=/home/me", *after]) == wanted.replace("t O", "t=O")


def test_a_ruler_table_has_a_row_an_arm_and_length_and_a_mean():
    records = [
        record("ruler", f"{task}/{length}", arm, "score", value)
        for task, values in (("vt", (1.0, 0.5)), ("cwe", (0.5, 0.0)))
        for length in (4096, 8192)
        for arm, value in zip(("dense", "zero"), values, strict=True)
    ]
    text = summary(records)
    assert "| dense | 4096 | 1.00 | 0.50 | 0.75 |" in text
    assert "| zero | 8192 | 0.50 | 0.00 | 0.25 |" in text
    assert "N = 3 problems" in text
    for value in ("abc", "jax 1", "cpu", "python -m x"):
        assert value in text


def test_cases_have_their_pooled_hit_and_masks_their_sd():
    records = [
        record("locomo", "locomo", "dense", "score", 0.6),
        record("locomo", "locomo", "dense", "score_se", 0.1),
        record("locomo", "locomo", "dense", "hit", 0.99),
        record("locomo", "locomo", "random/16", "score", 0.5, 5),
        record("locomo", "locomo", "random/16", "score_sd", 0.02, 5),
        record("locomo", "locomo", "dasc-nr/16", "score_delta", -0.1),
        record("locomo", "locomo", "dasc-nr/16", "kl", 0.25),
    ]
    text = summary(records)
    assert "0.600 ± 0.100" in text and "0.500 ± 0.020" in text and "0.9900" in text
    assert "| locomo | dasc-nr/16 | -0.100 |" in text and "0.2500" in text


@pytest.mark.parametrize(
    ("suite", "metrics", "expected"),
    [
        ("intervention", ("score",), "| intervention |"),
        ("horizons", ("median", "quartile_1", "quartile_3"), "[2.000, 3.000]"),
        ("trace", ("ttft_mean", "capacity", "hit", "e2e_p95"), "| server | arm | ttft_mean |"),
        ("kernels", ("time", "error"), "| time, u | dense |"),
        ("math", ("score",), "| case | N | hit |"),
    ],
)
def test_every_suite_has_its_table(
    tmp_path: Path, suite: str, metrics: tuple[str, ...], expected: str
):
    records = [record(suite, "case", "dense", m, float(i + 1)) for i, m in enumerate(metrics)]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    write_report(tmp_path)
    text = (tmp_path / "summary.md").read_text()
    assert expected in text
    for figure in tmp_path.glob("*.png"):
        assert f"![{figure.name}]" in text


def test_curves_are_drawn_over_their_parameter(tmp_path: Path):
    records = [
        record("replay-curve", "vt/4096", arm, metric, value)
        for arm, value in (("dense", 1.0), ("zero", 0.1), ("tail-replay/0.05", 0.7),
                           ("tail-replay/0.5", 0.9))
        for metric in ("score", "kl")
    ]  # fmt: skip
    records += [
        record("trace", "c", "dense", "ttft_mean", 1.5),
        record("trace", "c", "tail-replay/0.05", "ttft_mean", 0.5),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    write_report(tmp_path)
    written = {path.name for path in tmp_path.glob("*.png")}
    assert {"replay-curve-score.png", "replay-curve-kl.png", "trace-serving.png"} <= written
    assert "trace-trade-off-replay-curve.png" in written


def test_rules_say_what_holds_and_what_does_not():
    arms = {"dasc-nr": (0.9, 0.02), "dasc-wr": (1.0, 0.001), "anchored": (1.0, 0.002),
            "random": (0.8, 0.05), "inverse": (0.2, 0.5)}  # fmt: skip
    records = [
        record("retention-curve", f"vt/{length}", f"{arm}/64", metric, value)
        for length in (1024, 2048)
        for arm, values in arms.items()
        for metric, value in zip(("score", "kl"), values, strict=True)
    ]
    records.append(record("retention-curve", "vt/2048", "dasc-nr/64", "score", 0.6))
    records += [
        record("intervention", "niah_single_1/1024", "baseline", "score", 1.0),
        record("intervention", "niah_single_1/1024/depth-0", "baseline", "score", 0.0),
        record("intervention", "niah_single_1/1024", "zero-linear", "score_delta", -0.3),
    ]
    found = {f.claim + ": " + f.rule.split(" ")[0]: f for f in findings(records)}
    assert found["the model can: niah_single_1"].holds  # a depth is no case of its own
    assert found["the model can: vt"].holds is None
    needs = found["recall needs no state: zero-linear"]
    assert not needs.holds and needs.found == "0 of 1; not niah_single_1/1024 0.300"
    assert found["dasc beats random masks: score"].holds is False  # in one of two cells
    assert "1 of 2 (sign test p 1.000), by -0.050" in found["dasc beats random masks: score"].found
    assert sign_test(8, 0) == 2 / 2**8 and sign_test(5, 5) == 1.0
    assert found["dasc beats random masks: KL"].holds and found["control: KL"].holds
    assert found["refresh recovers: half"].holds
    assert not found["anchored is no worse than refresh: KL"].holds
    assert "| q | the model can | vt >= 0.9 | not measured | - |" in claims({"q": records})


def test_results_are_read_packed_and_written_once(tmp_path: Path):
    whole = json.dumps(record("math", "c", "dense", "score", 0.5)) + "\n"
    (tmp_path / "results.jsonl").write_text(whole + whole[:30])  # killed in a write
    file = ResultsFile(tmp_path)
    for _ in range(2):
        file.append(Result("math", "d", "dense", "score", 0.25, "score", 2))
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert lines[0] == whole.strip() and len(lines) == 2
    assert [r["value"] for r in read_results(tmp_path)] == [0.5, 0.25]
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "results.jsonl.xz").write_bytes(lzma.compress(whole.encode()))
    assert [r["value"] for r in read_results(packed)] == [0.5]
    with pytest.raises(FileNotFoundError, match="results.jsonl"):
        read_results(tmp_path / "nowhere")


def test_the_last_record_of_a_key_counts(tmp_path: Path):
    records = [record("math", "c", "dense", "score", value) for value in (0.1, 0.2)]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    frame = Frame("math", read_results(tmp_path))
    assert frame.value("c", "dense", "score") == 0.2 and len(frame.records) == 1
    assert frame.mean(["c"], "dense", "score") == 0.2
    assert frame.mean(["c", "other"], "dense", "score") is None
