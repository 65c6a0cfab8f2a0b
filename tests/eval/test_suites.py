"""Every suite as its users run it, small: the demo model, made-up data, results and a summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jhybrid.eval.__main__ import SUITES, main
from jhybrid.eval.results import read_results
from tests.eval.data_files import write_data

ROOT = Path(__file__).parents[2]
ENGINE = [
    *("demo", "--max-running", "2", "--max-prefill-tokens", "64", "--state-memory", "16MiB"),
    *("--kv-memory", "16MiB", "--compilation-cache", str(ROOT / "build" / "xla")),
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
    tasks = "niah_single_1,niah_multikey_1,niah_multiquery,vt,cwe,fwe,qa_1,last_write,kth_item"
    arms = ["--data", data, "--arms", "dense,zero", "--replays", "2", "--tasks", tasks]
    found = run("ruler", tmp_path, *QUALITY, *RULER, *arms)
    for task in tasks.split(","):
        case = f"{task}/700"
        assert found[case, "dense", "hit"] > 0.5 and found[case, "dense", "loaded"] == 1
        assert 0 <= found[case, "zero", "score"] <= 1
        assert found[case, "zero", "kl"] > 1e-4
    text = (tmp_path / "summary.md").read_text()
    assert "| arm | length | niah_single_1 |" in text and "| Avg |" in text
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


def test_intervention(tmp_path: Path):
    flags = ["--lengths", "600", "--samples", "1", "--depths", "0,100"]
    found = run("intervention", tmp_path, *QUALITY, *flags, "--max-new-tokens", "9")
    case = "niah_single_1/600"
    assert found[case, "baseline", "score"] == 1
    assert found[case, "zero-full-kv", "score"] == found[case, "zero-both", "score"] == 0
    assert found[case, "zero-linear", "kl"] > 0 < found[case, "zero-full-kv", "nll_delta"]
    assert "depth-100" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "intervention-score.png").stat().st_size > 1000


def test_retention_curve(tmp_path: Path):
    arms = "random-1234/{},random-2027/{},inverse/{},full/{},horizon/{},dasc-nr/512"
    flags = ["--tasks", "last_write", "--arms", arms, "--curve-windows", "16,512"]
    found = run("retention-curve", tmp_path, *QUALITY, *RULER, *flags)
    case = "last_write/700"
    assert found[case, "full/16", "kl"] == 0
    assert found[case, "inverse/512", "kl"] > 0
    nr, mask = (found[case, arm, "kl"] for arm in ("dasc-nr/512", "horizon/512"))
    assert nr == pytest.approx(mask, abs=1e-6) and nr > 0
    assert found[case, "dasc-nr/512", "as_asked"] == 1
    masks = [found[case, f"random-{seed}/512", "kl"] for seed in (1234, 2027)]
    assert found[case, "random/512", "kl"] == pytest.approx(sum(masks) / 2)
    assert found[case, "random/512", "kl_sd"] == pytest.approx(abs(masks[0] - masks[1]) / 2**0.5)
    assert (tmp_path / "retention-curve-kl.png").stat().st_size > 1000


def test_replay_curve(tmp_path: Path):
    flags = ["--tasks", "niah_single_1", "--arms", "tail-replay/{}", "--curve-ratios", "0.1,1"]
    found = run("replay-curve", tmp_path, *QUALITY, *RULER, *flags)
    case = "niah_single_1/700"
    assert found[case, "off", "score_delta"] == 0 and found[case, "off", "hit"] == 0
    assert found[case, "tail-replay/1", "kl"] < 1e-5
    assert found[case, "zero", "kl"] > found[case, "tail-replay/0.1", "kl"] > 1e-5
    assert (tmp_path / "replay-curve-score.png").stat().st_size > 1000


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


def test_every_suite_is_tried_here_or_needs_a_gpu():
    tried = {name.removeprefix("test_").replace("_", "-") for name in globals()}
    elsewhere = {"kernels", "model", "profile", "ttft", "retention-load", "checkpoint-moves"}
    elsewhere |= {"engine-moves"}
    assert set(SUITES) - elsewhere <= tried


def test_wrong_flags_and_missing_data_are_said_in_a_line(tmp_path: Path):
    for flags, message in (
        (["ruler", *ENGINE, "--arms", "best"], "error: arm"),
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
