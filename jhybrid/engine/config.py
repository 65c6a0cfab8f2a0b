"""Engine configuration: the flags of serve and eval, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import require
from .request import RecoveryName

RECOVERIES: tuple[RecoveryName, ...] = ("dense", "zero", "off")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Sizes are bytes; None lets the engine choose from what the device has.

    `max_context` bounds prompt plus output of a request in tokens; `checkpoint_interval` is the
    distance in tokens between the checkpoints that a long prefill leaves; `max_queue` the number
    of requests that may wait.
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
    max_queue: int = 1024
    seed: int = 0
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        require(
            self.recovery in RECOVERIES,
            "recovery",
            self.recovery,
            f"one of {', '.join(RECOVERIES)}",
        )
        known = (None, "float32", "bfloat16")
        require(self.dtype in known, "dtype", self.dtype, "float32 or bfloat16")
        for name, least in _LEAST.items():
            value: Any = getattr(self, name)
            good = value is None or (isinstance(value, int) and value >= least)
            require(good, name, value, f"an integer of at least {least}")


_LEAST = {
    "tp": 1,
    "max_context": 2,
    "max_running": 1,
    "max_prefill_tokens": 16,
    "page_size": 1,
    "checkpoint_interval": 1,
    "kv_memory": 1,
    "state_memory": 1,
    "max_queue": 1,
}
