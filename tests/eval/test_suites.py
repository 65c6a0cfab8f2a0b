"""Every suite as its users run it, small: the demo model, made-up data, results and a summary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jhybrid.eval.__main__ import SUITES, main
from jhybrid.eval.arms import MASK_SEEDS
from jhybrid.eval.results import read_results
from jhybrid.eval.suites import controlled
from tests.eval.data_files import write_data
from tests.serve.conftest import RunningServer
from tests.serve.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
CACHE = str(ROOT / "build" / "xla")
ENGINE = [
    *("demo", "--max-running", "2", "--max-prefill-tokens", "64", "--state-memory", "16MiB"),
    *("--kv-memory", "16MiB", "--compilation-cache", CACHE),
]
QUALITY = ["--wording", "plain", "--max-context", "4096", "--max-new-tokens", "4"]
RULER = ["--lengths", "700", "--samples", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def run(suite: str, out: Path, *flags: str | Path) -> dict[tuple[str, str, str], float]:
    """(case, arm, metric) -> value of what the suite wrote."""
    main([suite, *ENGINE, "--out", str(out), *map(str, flags)])
    assert (out / "summary.md").read_text().startswith("# Results")
    records = read_results(out)
    assert all(r["commit"] and r["versions"] and r["device"] and r["command"] for r in records)
    assert {r["suite"] for r in records} == {suite}
    return {(r["case"], r["arm"], r["metric"]): r["value"] for r in records}


def test_ruler(data: Path, tmp_path: Path):
    tasks = "niah_multikey_1,cwe,qa_1,kth_item"
    arms = ["--data", data, "--arms", "dense,zero", "--replays", "2", "--tasks", tasks]
    found = run("ruler", tmp_path, *QUALITY, *RULER, *arms)
    for task in tasks.split(","):
        case = f"{task}/700"
        assert found[case, "dense", "hit"] > 0.5 and found[case, "dense", "loaded"] == 1
        assert 0 <= found[case, "zero", "score"] <= 1
        assert found[case, "zero", "kl"] > 1e-4
    text = (tmp_path / "summary.md").read_text()
    assert "| arm | length | niah_multikey_1 |" in text and "| Avg |" in text
    before = (tmp_path / "outputs.jsonl").read_text()
    run("ruler", tmp_path, *QUALITY, *RULER, *arms)
    assert (tmp_path / "outputs.jsonl").read_text() == before  # all was there


def test_longbench(data: Path, tmp_path: Path):
    flags = ["--data", data, "--arms", "dense,off", "--lengths", "1200", "--limit", "1"]
    found = run("longbench", tmp_path, *QUALITY, *flags, "--no-probe")
    for task in ("narrativeqa", "qasper", "hotpotqa", "musique", "qmsum"):
        assert found[f"{task}/1200", "dense", "hit"] > 0.5
        assert found[f"{task}/1200", "off", "hit"] == 0
        assert found[f"{task}/1200", "off", "score_delta"] == 0  # a hit changes nothing


def test_locomo(data: Path, tmp_path: Path):
    flags = ["--data", data, "--arms", "dense", "--conversations", "1"]
    found = run("locomo", tmp_path, *QUALITY, *flags)
    assert {("locomo", "dense", "score"), ("locomo/without-5", "dense", "score")} <= set(found)
    assert found["locomo", "dense", "hit"] > 0.4


def test_choice(data: Path, tmp_path: Path):
    flags = ["--data", data, "--arms", "dense,full/16", "--replays", "2", "--limit", "1"]
    found = run("choice", tmp_path, *QUALITY, *flags)
    assert found["mmlu_pro", "full/16", "score_delta"] == 0  # the same seeds, and nothing left out
    assert found["gpqa", "dense", "hit"] > 0.9


def test_math(data: Path, tmp_path: Path):
    flags = ["--data", data, "--arms", "dense", "--replays", "1", "--limit", "2", "--chat"]
    found = run("math", tmp_path, *QUALITY, *flags)
    assert {c for c, _, _ in found} == {"aime", "aime/gradable", "hmmt", "hmmt/gradable",
                                        "imo", "imo/gradable"}  # fmt: skip


def test_quality(data: Path, tmp_path: Path):
    """All three controlled suites and the horizons, from one set of problems."""
    main([
        "quality", "demo", "--out", str(tmp_path), "--data", str(data), "--wording", "plain",
        "--max-running", "4", "--max-prefill-tokens", "1024", "--compilation-cache", CACHE,
        "--lengths", "512", "--samples", "2", "--depths", "0,100", "--max-new-tokens", "9",
        "--tasks", "niah_single_1,last_write", "--curve-windows", "256",
        "--curve-ratios", "0.1,1", "--prefixes", "1",
    ])  # fmt: skip
    found = {(r["suite"], r["case"], r["arm"], r["metric"]): r["value"] for r in
             read_results(tmp_path)}  # fmt: skip
    table, needle, writes = "intervention", "niah_single_1/512", "last_write/512"
    assert found[table, f"{needle}/depth-100", "baseline", "score"] == 1
    for arm in ("zero-full-kv", "mask-full-kv", "zero-both", "mask-both"):
        assert found[table, needle, arm, "score"] == 0
    assert found[table, needle, "zero-linear", "kl"] > 0
    curve = "retention-curve"
    for case in (needle, writes):
        kl = {arm: found[curve, case, arm, "kl"] for s, c, arm, m in found
              if (s, c, m) == (curve, case, "kl")}  # fmt: skip
        controls = kl["random/256"], kl["inverse/256"]
        assert 0 <= kl["dasc-wr/256"] <= kl["dasc-nr/256"] < min(controls)
        masks = [kl[f"random-{seed}/256"] for seed in MASK_SEEDS]
        assert kl["random/256"] == pytest.approx(sum(masks) / 5)
        assert found[curve, case, "random/256", "kl_sd"] > 0
        replay = {arm: found["replay-curve", case, arm, "kl"] for arm in
                  ("off", "zero", "tail-replay/0.1", "tail-replay/1")}  # fmt: skip
        assert replay["tail-replay/1"] < 1e-5 and replay["off"] < 1e-5
        assert replay["zero"] > replay["tail-replay/0.1"] > 1e-5
    assert found["horizons", "demo", "H_s, H_e", "median"] > 0.5
    text = (tmp_path / "summary.md").read_text()
    assert "depth-100" in text and "| arm | length | niah_single_1 |" in text
    for name in ("intervention-score", "retention-curve-kl", "replay-curve-score"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    main(["report", str(tmp_path), "--out", str(tmp_path / "both")])
    findings = (tmp_path / "both" / "models.md").read_text()
    assert re.search(
        r"recall needs KV \| zero-full-kv <= 0.05 on needles \| 1 of 1 \| yes", findings
    )
    assert re.search(r"all of it is exact \|[^|]*\| 2 of 2 \| yes", findings)
    assert "vt >= 0.9 | not measured | -" in findings


def test_horizons(data: Path, tmp_path: Path):
    flags = ["--data", data, "--lengths", "128,64", "--samples", "1", "--max-context", "4096"]
    found = run("horizons", tmp_path, *flags)
    assert -1 <= found["demo", "H_s, M_S", "median"] <= 1
    assert found["demo", "H_s, H_e", "quartile_1"] > 0.3  # the demo's gates stay near their bias
    assert (tmp_path / "horizons.png").stat().st_size > 1000


def test_trace(tmp_path: Path):
    flags = ["--conversations", "3", "--turns", "2", "--scale", "0.02", "--seeds", "0,1"]
    limits = [
        "--arms",
        "dense,dasc-nr/16",
        "--limits",
        "2",
        "--concurrency",
        "3",
        "--max-context",
        "4096",
    ]
    found = run("trace", tmp_path, *flags, *limits)
    case = "concurrency-3/limit-2"
    assert found[case, "dense", "requests_failed"] == 0 and found[case, "dense", "hit"] > 0
    assert 0 < found[case, "dense", "ttft_mean"] <= found[case, "dense", "e2e_mean"]
    assert found[case, "dasc-nr/16", "hit"] > 0
    # the same budget holds more of the smaller states
    assert found[case, "dasc-nr/16", "capacity"] > found[case, "dense", "capacity"] > 2
    assert len(json.loads((tmp_path / "trace.jsonl").read_text().split("\n")[0])["answers"]) == 6
    assert (tmp_path / "trace-serving.png").stat().st_size > 1000


def test_trace_of_a_server_that_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Whoever started it: its address, its key, and the name it has in the results."""
    server = RunningServer(FakeEngine(), api_key="secret")
    flags = ["--conversations", "3", "--turns", "2", "--scale", "0.02", "--seeds", "0,1"]
    flags += ["--arms", "dense", "--concurrency", "2", "--max-context", "4096"]
    flags += ["--base-url", f"{server.url}/v1", "--api-key", "secret"]
    try:
        found = run("trace", tmp_path, *flags)
        sent = list(server.engine.added)
        assert run("trace", tmp_path, *flags) == found and server.engine.added == sent  # resumed
        server.engine.flush_cache = lambda: False
        run("trace", tmp_path / "warm", *flags, "--seeds", "2")
    finally:
        server.stop()
    case = "concurrency-2/limit-32"
    assert len(sent) == 2 * 3 * 2 and {r.params.ignore_eos for r in sent} == {True}
    assert found[case, "dense", "requests_failed"] == 0
    assert found[case, "dense", "generated"] == sum(r.params.max_tokens or 0 for r in sent) / 2
    assert 0.2 < found[case, "dense", "hit"] <= 0.25  # what this engine says of every prompt
    assert (case, "dense", "capacity") not in found  # it has no pools to tell of
    assert not list(tmp_path.glob("server-*.log"))  # none was started
    said = [r.getMessage() for r in caplog.records if r.name.endswith("suites.trace")]
    assert len(said) == 1 and "seed 2" in said[0]
    with pytest.raises(SystemExit, match="one name for the server"):
        main(["trace", "demo", "--base-url", server.url, "--arms", "dense,off", "--out", "x"])


def test_every_suite_is_tried_here_or_needs_a_gpu():
    tried = {name.removeprefix("test_").replace("_", "-") for name in globals()}
    tried |= {"report", *(part.name for part in controlled.SUITES["quality"].parts)}
    elsewhere = {"kernels", "model", "profile", "ttft", "retention-load", "checkpoint-moves"}
    elsewhere |= {"engine-moves"}
    assert set(SUITES) - elsewhere <= tried


def test_wrong_flags_and_missing_data_are_said_in_a_line(tmp_path: Path):
    for flags, message in (
        (["trace", *ENGINE, "--arms", "zero-both"], "error: arm"),
        (["locomo", *ENGINE, "--arms", "dense", "--max-context", "512"], "locomo10.json"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*flags, "--out", str(tmp_path)])


def test_state_error(tmp_path: Path):
    flags = ["--arms", "dense,tail-replay/0.1", "--wording", "plain", "--max-new-tokens", "4"]
    main(["state-error", *ENGINE, "--out", str(tmp_path), *flags, "--max-context", "1024", *RULER])
    found = {(r["arm"], r["metric"]): r["value"] for r in read_results(tmp_path)}
    assert found["dense", "state_error"] == found["dense", "replayed"] == 0
    assert 0.01 < found["tail-replay/0.1", "state_error"] < 1
    assert found["tail-replay/0.1", "replayed"] > 30
    assert "| tail-replay/0.1 |" in (tmp_path / "summary.md").read_text()
