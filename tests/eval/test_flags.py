"""Flags that take lists: what cannot be read is said with the flag, the value, what is expected."""

from __future__ import annotations

import argparse

import pytest

from jhybrid.eval.__main__ import SUITES

HERE = ["--out", "unused"]
WHOLE = "whole numbers of at least 1"


def parse(suite: str, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    SUITES[suite].add_arguments(parser)
    return parser.parse_args([*HERE, *flags])


@pytest.mark.parametrize(
    ("suite", "flag", "value", "expected"),
    [
        *((s, "--lengths", "abc", WHOLE) for s in ("ruler", "longbench", "horizons", "quality")),
        *((s, "--lengths", "700,", WHOLE) for s in ("intervention", "state-error", "ttft")),
        ("ruler", "--lengths", "0", WHOLE),
        ("ruler", "--tasks", "niah,vt", "some of niah_single_1"),
        ("longbench", "--tasks", "qasper,x", "some of narrativeqa"),
        ("choice", "--tasks", "mmlu", "some of mmlu_pro, gpqa"),
        ("math", "--tasks", "aime2", "some of aime, hmmt, imo"),
        ("ruler", "--arms", "dense,best", "an arm"),
        ("state-error", "--arms", "dasc-nr/2", "a window of at least 4 tokens"),
        ("trace", "--arms", ",", "names of arms"),
        ("intervention", "--arms", "zero-kv", "an arm"),
        ("retention-curve", "--arms", "dasc/{}", "an arm"),
        ("retention-curve", "--curve-windows", "16,3", "whole numbers of at least 4"),
        ("replay-curve", "--curve-ratios", "5%", "numbers above 0 and up to 1"),
        ("quality", "--curve-ratios", "0", "numbers above 0 and up to 1"),
        ("intervention", "--depths", "0,101", "whole numbers from 0 to 100"),
        ("trace", "--limits", "32;16", WHOLE),
        ("trace", "--seeds", "0,x", "whole numbers"),
        ("model", "--prefill", "2k", WHOLE),
        ("model", "--decode", "1,0", WHOLE),
        ("ttft", "--ratios", "0.1,2", "numbers above 0 and up to 1"),
        ("engine-moves", "--rates", "fast", WHOLE),
        ("profile", "--steps", "prefill:8192,decode:x", "prefill:TOKENS"),
        ("profile", "--steps", "replay:64:8", "replay:TOKENS"),
        ("kernels", "--arms", "triton", "some of pallas, auto, xla, fla, cudnn"),
        ("ruler", "--samples", "none", "whole number of at least 1"),
    ],
)
def test_a_list_that_cannot_be_read(
    suite: str, flag: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parse(suite, flag, value)
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}: " in said and repr(value) in said and expected in said


def test_lists_are_read_in_order():
    args = parse("trace", "--limits", "32, 16", "--seeds", "3,-1", "--arms", "dense,random/16")
    assert (args.limits, args.seeds) == ([32, 16], [3, -1])
    assert len(args.arms) == 6  # five masks
    assert parse("ttft").ratios == [0.05, 0.1] and parse("ttft").timelines == []
    assert parse("replay-curve", "--curve-ratios", "0.10,1").curve_ratios == ["0.10", "1"]
    assert [str(s) for s in parse("profile", "--steps", "decode:8:1024").steps] == ["decode/8@1024"]
    assert parse("retention-curve", "--arms", "dense,inverse/{}").arms == "dense,inverse/{}"


def test_arms_of_suites_that_have_their_own_are_not_taken():
    with pytest.raises(SystemExit):
        parse("quality", "--arms", "dense")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["ttft", "--arms", "tail,best"], "--arms: expected part of one of .*got 'best'"),
        (["ttft", "--timelines", "dense"], "--timelines: expected one of .*got 'dense'"),
        (
            ["kernels", "--dry-run", "--cases", "gdm"],
            "--cases: expected part of .*got 'gdm'",
        ),
    ],
)
def test_a_name_that_chooses_nothing_is_refused(flags: list[str], message: str, tmp_path):
    args = parse(*flags, "--out", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        SUITES[flags[0]].run(args)
