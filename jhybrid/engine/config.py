"""Engine configuration: the flags of serve and eval, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import require
from ..retention.layout import LayoutKind
from ..retention.placement import PLACEMENTS, PlacementKind
from ..retention.ratios import CheckpointDtype
from ..retention.selection import SHORTEST_REPLAY
from .request import RecoveryName

COMPRESSED: tuple[RecoveryName, ...] = ("dasc-nr", "dasc-wr")  # read compressed states
RECOVERIES: tuple[RecoveryName, ...] = ("dense", *COMPRESSED, "zero", "off")
DEFAULT_W_MAX = 16  # tokens: the paper's conservative cutoff


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Sizes are bytes; None lets the engine choose from what the device has.

    `max_context` bounds prompt plus output of a request in tokens; `checkpoint_interval` is the
    distance in tokens between the checkpoints that a long prefill leaves; `max_queue` the number
    of requests that may wait. `w_max` is the cutoff of selection in tokens; given, or with a
    recovery that needs it, there is a compressed pool beside the native slots, both within
    `state_memory`; `native_slots` sets how many of those there are.
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
    checkpoint_dtype: CheckpointDtype = "float32"
    layout: LayoutKind = "ragged"
    placement: PlacementKind = "off"
    native_slots: int | None = None
    max_queue: int = 1024
    seed: int = 0
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            require(value in known, name, value, f"one of {', '.join(filter(None, known))}")
        if self.recovery in COMPRESSED and self.w_max is None:
            object.__setattr__(self, "w_max", DEFAULT_W_MAX)
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
        return tuple(r for r in RECOVERIES if self.compresses or r not in COMPRESSED)


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "recovery": RECOVERIES,
    "dtype": (None, "float32", "bfloat16"),
    "checkpoint_dtype": ("float32", "int8"),
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
    "max_queue": 1,
}
