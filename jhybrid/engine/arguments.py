"""Command-line flags of the engine, shared by every program that builds one.

A flag that is not given is None: defaults belong to the engine's configuration.
"""

from __future__ import annotations

import argparse
import re

from jhybrid.engine.config import DEFAULT_W_MAX, RECOVERIES
from jhybrid.retention.placement import PLACEMENTS

SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 2 ** (10 * power) for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate("kmgt", start=1)},
}


def parse_size(text: str) -> int:
    """Bytes from `1048576`, `64MiB` or `1.5GiB`; MB and GB are powers of ten."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None or match[2].lower() not in SIZE_UNITS:
        raise ValueError(f"size must be bytes or like 64MiB or 2GiB, got {text!r}")
    unit = SIZE_UNITS[match[2].lower()]
    return int(match[1]) * unit if "." not in match[1] else int(float(match[1]) * unit)


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="demo",
        metavar="MODEL",
        help="converted or Hugging Face checkpoint directory, demo, demo-kda, or dummy:PRESET",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--tp", type=positive, metavar="N", help="tensor parallel ranks")
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help="of weights and KV")
    model.add_argument("--max-context", type=positive, metavar="N", help="prompt plus output")

    cache = parser.add_argument_group("prefix cache")
    cache.add_argument(
        "--recovery",
        choices=RECOVERIES,
        default="dense",
        help="how a hit becomes an active state (default: dense)",
    )
    cache.add_argument(
        "--checkpoint-interval",
        type=positive,
        metavar="N",
        help="tokens between the checkpoints that a long prefill leaves (default: 512)",
    )

    cache.add_argument(
        "--w-max",
        type=positive,
        metavar="N",
        help="compressed checkpoints keep what remembers more than N tokens (default with dasc-*: "
        f"{DEFAULT_W_MAX})",
    )
    cache.add_argument(
        "--a-s",
        type=float,
        metavar="X",
        help="gate input at which weights say how long that is (default: the model's)",
    )
    cache.add_argument(
        "--checkpoint-dtype",
        choices=("float32", "int8"),
        help="of the states in them (default: float32)",
    )
    cache.add_argument(
        "--layout",
        choices=("ragged", "padded"),
        help="of the units that each layer keeps (default: ragged)",
    )
    cache.add_argument(
        "--placement",
        choices=PLACEMENTS,
        help="of kept units over ranks: as computed, balanced in storage, or heads permuted too "
        "(default: off)",
    )

    cache.add_argument(
        "--replay-ratio",
        type=float,
        metavar="R",
        help="share of a match that tail-replay replays, and anchored at most (default: 0.1)",
    )
    cache.add_argument(
        "--group-inputs",
        metavar="all|tail:N",
        help="keep those of all tokens, or of the last N before the end of a prompt and of a "
        "request (default with tail-replay and anchored: all)",
    )
    cache.add_argument(
        "--group-input-dtype", choices=("model", "fp8"), help="of the kept ones (default: model)"
    )

    memory = parser.add_argument_group("memory (bytes, or like 64MiB)")
    memory.add_argument(
        "--state-memory",
        type=size,
        metavar="SIZE",
        help="recurrent states: running ones and all checkpoints (default: from what is free)",
    )
    memory.add_argument(
        "--native-slots",
        type=positive,
        metavar="N",
        help="of the state memory; what is left is for compressed checkpoints (default: enough for "
        "what runs)",
    )
    memory.add_argument(
        "--kv-memory", type=size, metavar="SIZE", help="keys and values (default: likewise)"
    )
    memory.add_argument(
        "--group-input-memory",
        type=size,
        metavar="SIZE",
        help="group inputs (default: out of the KV memory, as much as goes with the KV, or a "
        "quarter with tail:N)",
    )
    memory.add_argument(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="pinned host memory for KV and group inputs that leave the device (default: none)",
    )
    memory.add_argument(
        "--page-size", type=positive, metavar="N", help="tokens per KV page (default: 16)"
    )

    schedule = parser.add_argument_group("scheduling")
    schedule.add_argument(
        "--max-running", type=positive, metavar="N", help="sequences at once (default: 32)"
    )
    schedule.add_argument(
        "--max-prefill-tokens", type=positive, metavar="N", help="per step (default: 2048)"
    )
    schedule.add_argument(
        "--max-queue", type=positive, metavar="N", help="waiting sequences before 429 (1024)"
    )
    schedule.add_argument("--seed", type=int, metavar="N", help="of requests without one (0)")
    schedule.add_argument(
        "--compilation-cache",
        metavar="DIR",
        help="compiled steps, kept between starts (default: ~/.cache/jhybrid/xla)",
    )
