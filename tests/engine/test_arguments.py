"""Sizes and flags of the command line."""

import argparse

import pytest

from jhybrid.engine.arguments import add_engine_arguments, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1048576", 2**20), ("64MiB", 2**26), ("2GiB", 2**31), ("1.5GiB", 3 * 2**29)]
    + [("2GB", 2 * 10**9), ("8 kib", 2**13), ("1tib", 2**40), ("512B", 512)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "64M", "nan", "1.2.3GiB", "٣"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="64MiB"):
        parse_size(text)


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return parser.parse_args(argv)


def test_flags_have_the_names_of_the_python_keywords():
    args = parse("dummy:x", "--max-running", "8", "--kv-memory", "1GiB", "--recovery", "zero")
    assert (args.model, args.max_running, args.kv_memory, args.recovery) == (
        "dummy:x",
        8,
        2**30,
        "zero",
    )
    args = parse("--recovery", "dasc-wr", "--w-max", "64", "--checkpoint-dtype", "int8")
    assert (args.recovery, args.w_max, args.checkpoint_dtype) == ("dasc-wr", 64, "int8")
    args = parse("--layout", "padded", "--placement", "hybrid", "--native-slots", "9", "--a-s", "0")
    assert (args.layout, args.placement, args.native_slots, args.a_s) == ("padded", "hybrid", 9, 0)
    assert parse().model == "demo" and parse().recovery == "dense" and parse().tp is None


@pytest.mark.parametrize(
    "argv",
    [("--recovery", "best"), ("--max-queue", "-1"), ("--page-size", "0")]
    + [("--kv-memory", "many"), ("--recovery", "magic"), ("--tp", "two")]
    + [("--w-max", "0"), ("--layout", "dense"), ("--placement", "on"), ("--a-s", "x")],
)
def test_impossible_values_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err
