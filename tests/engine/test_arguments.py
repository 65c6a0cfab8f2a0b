"""Sizes and flags of the command line."""

import argparse

import pytest

from jhybrid.engine.arguments import add_engine_arguments, parse_size
from jhybrid.engine.build import create_engine, warn_unread
from jhybrid.engine.config import EngineConfig, flags_for_requests, idle_flags


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


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ({}, []),
        ({"recovery": "dasc-nr", "layout": "padded", "native_slots": 9, "a_s": 0.0}, []),
        ({"w_max": 64, "checkpoint_dtype": "int8"}, []),
        ({"recovery": "anchored", "replay_ratio": 0.5, "group_input_dtype": "fp8"}, []),
        ({"group_inputs": "tail:9", "replay_ratio": 0.5, "host_memory": 2**20}, []),
        ({"host_memory": 2**20}, []),  # KV and states leave the device, too
        ({"replay_ratio": 0.5}, ["--replay-ratio 0.5"]),
        ({"recovery": "dasc-wr", "group_input_memory": 9}, ["--group-input-memory 9"]),
        ({"recovery": "tail-replay", "checkpoint_dtype": "int8"}, ["--checkpoint-dtype int8"]),
        ({"layout": "padded", "native_slots": 9}, ["--layout padded", "--native-slots 9"]),
        ({"a_s": -0.5, "placement": "storage"}, ["--a-s -0.5", "--placement storage"]),
        ({"w_max": 16, "placement": "hybrid"}, ["--placement hybrid"]),
        ({"w_max": 16, "placement": "hybrid", "tp": 2}, []),
    ],
)
def test_flags_without_effect_are_said_with_what_they_need(flags, idle):
    said = list(idle_flags(EngineConfig(**flags)))
    assert [message.partition(" has no effect without ")[0] for message in said] == idle
    needs = {"--placement hybrid": "--tp", "--replay-ratio 0.5": "--group-inputs, --recovery tail"}
    assert all(needs.get(name, "--") in message for name, message in zip(idle, said, strict=True))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"w_max": 16}, ["--w-max 16 serves requests that ask for dasc-nr or dasc-wr, dense"]),
        ({"group_inputs": "all"}, ["--group-inputs all serves requests that ask for tail-replay"]),
        ({"w_max": 16, "recovery": "anchored"}, []),
        ({"recovery": "dasc-wr"}, []),
        ({"recovery": "tail-replay"}, []),
    ],
)
def test_flags_for_other_recoveries_are_said(flags, said):
    found = list(flags_for_requests(EngineConfig(**flags)))
    assert len(found) == len(said)
    assert all(message.startswith(start) for message, start in zip(found, said, strict=True))


def test_an_engine_says_what_has_no_effect_before_it_is_built(caplog):
    with caplog.at_level("INFO", "jhybrid"), pytest.raises(ValueError, match="model"):
        create_engine("no such folder", EngineConfig(replay_ratio=0.5, w_max=16))
    levels = {record.getMessage().split()[0]: record.levelname for record in caplog.records}
    assert levels == {"--replay-ratio": "WARNING", "--w-max": "INFO"}


def test_programs_without_an_engine_say_which_flags_they_do_not_read(caplog):
    warn_unread(parse("--tp", "1", "--max-queue", "5", "--page-size", "32"), ("page_size",))
    assert [record.getMessage().split(" has ")[0] for record in caplog.records] == ["--max-queue 5"]
