"""Engine configuration: the flags of serve and eval, validated once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..config import require
from ..retention.layout import LayoutKind
from ..retention.placement import PLACEMENTS, PlacementKind
from ..retention.ratios import CheckpointDtype
from ..retention.selection import SHORTEST_REPLAY
from .recovery import REPLAYING
from .request import RecoveryName

COMPRESSED: tuple[RecoveryName, ...] = ("dasc-nr", "dasc-wr")  # read compressed states
RECOVERIES: tuple[RecoveryName, ...] = ("dense", *COMPRESSED, *REPLAYING, "zero", "off")
DEFAULT_W_MAX = 16  # tokens: the paper's conservative cutoff


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Sizes are bytes; None lets the engine choose from what the device has.

    `max_context` bounds prompt plus output of a request in tokens; `checkpoint_interval` is the
    distance in tokens between the checkpoints that a long prefill leaves; `max_queue` the number
    of requests that may wait. `w_max` is the cutoff of selection in tokens; given, or with a
    recovery that needs it, there is a compressed pool beside the native slots, both within
    `state_memory`; `native_slots` sets how many of those there are. `a_s` is the gate input
    at which horizons are taken, None for the model's.

    `group_inputs` says whose are kept beside the KV: of `all` tokens, or of the last N before the
    end of a prompt and of a request (`tail:N`); given, or with a recovery that replays them, there
    are pages for them: within `kv_memory`, or of their own `group_input_memory`. `replay_ratio` is
    the share of a match that a replay may take. `host_memory` is for pages that leave the device.
    """

    recovery: RecoveryName = "dense"
    tp: int = 1
    dtype: str | None = None
    max_context: int | None = None
    max_running: int = 32
    max_prefill_tokens: int = 2048
    page_size: int = 16
    checkpoint_interval: int = 512
    kv_memory: int | None = None
    state_memory: int | None = None
    w_max: int | None = None
    a_s: float | None = None
    checkpoint_dtype: CheckpointDtype = "float32"
    layout: LayoutKind = "ragged"
    placement: PlacementKind = "off"
    native_slots: int | None = None
    replay_ratio: float = 0.1
    group_inputs: str | None = None
    group_input_dtype: Literal["model", "fp8"] = "model"
    group_input_memory: int | None = None
    host_memory: int | None = None
    max_queue: int = 1024
    seed: int = 0
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            require(value in known, name, value, f"one of {', '.join(filter(None, known))}")
        if self.recovery in COMPRESSED and self.w_max is None:
            object.__setattr__(self, "w_max", DEFAULT_W_MAX)
        if self.recovery in REPLAYING and self.group_inputs is None:
            object.__setattr__(self, "group_inputs", "all")
        known = re.fullmatch(r"all|tail:0*[1-9][0-9]*", self.group_inputs or "all", re.ASCII)
        require(known is not None, "group_inputs", self.group_inputs, "all or tail:N")
        ratio = self.replay_ratio
        require(0 <= ratio <= 1, "replay_ratio", ratio, "a number from 0 to 1")
        for name, least in _LEAST.items():
            value: Any = getattr(self, name)
            good = value is None or (isinstance(value, int) and value >= least)
            require(good, name, value, f"an integer of at least {least}")

    @property
    def compresses(self) -> bool:
        """Whether there is a compressed pool."""
        return self.w_max is not None

    @property
    def recoveries(self) -> tuple[RecoveryName, ...]:
        """Those that a request may ask for."""
        missing = () if self.compresses else COMPRESSED
        missing += () if self.group_inputs else REPLAYING
        return tuple(r for r in RECOVERIES if r not in missing)

    @property
    def input_tail(self) -> int | None:
        """How many tokens before a boundary keep their group inputs; None for all."""
        _, _, tail = (self.group_inputs or "").partition(":")
        return int(tail) if tail else None


def flag(name: str, value: object) -> str:
    """As it is given on the command line."""
    return f"--{name.replace('_', '-')} {value}"


def idle_flags(engine: EngineConfig) -> Iterator[str]:
    """What was set and has no effect, with what it would need."""
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    compressed = ", ".join(f"--recovery {name}" for name in COMPRESSED)
    replaying = ", ".join(f"--recovery {name}" for name in REPLAYING)
    needs = {
        f"compressed checkpoints (--w-max, {compressed})": () if engine.compresses else _OF_PLAN,
        f"group inputs (--group-inputs, {replaying})": () if engine.group_inputs else _OF_INPUTS,
        "more than one rank (--tp)": ("placement",) if engine.compresses and engine.tp == 1 else (),
    }
    for need, names in needs.items():
        for name in names:
            value = getattr(engine, name)
            if value != defaults[name]:
                yield f"{flag(name, value)} has no effect without {need}"


def flags_for_requests(engine: EngineConfig) -> Iterator[str]:
    """What was set and serves only requests that ask for another recovery than the engine's."""
    readers = {"w_max": (*COMPRESSED, "anchored"), "group_inputs": REPLAYING}
    for name, names in readers.items():
        value, own = getattr(engine, name), engine.recovery
        if value is not None and own not in names:
            able = " or ".join(r for r in names if r in engine.recoveries)
            yield f"{flag(name, value)} serves requests that ask for {able}, {own} does not read it"


_OF_PLAN = ("a_s", "checkpoint_dtype", "layout", "placement", "native_slots")
_OF_INPUTS = ("replay_ratio", "group_input_dtype", "group_input_memory")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "recovery": RECOVERIES,
    "dtype": (None, "float32", "bfloat16"),
    "checkpoint_dtype": ("float32", "int8"),
    "group_input_dtype": ("model", "fp8"),
    "layout": ("ragged", "padded"),
    "placement": PLACEMENTS,
}
_LEAST = {
    "tp": 1,
    "max_context": 2,
    "max_running": 1,
    "max_prefill_tokens": 16,
    "page_size": 1,
    "checkpoint_interval": 1,
    "kv_memory": 1,
    "state_memory": 1,
    "w_max": SHORTEST_REPLAY,
    "native_slots": 1,
    "group_input_memory": 1,
    "host_memory": 1,
    "max_queue": 1,
}
