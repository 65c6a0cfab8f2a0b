"""A tuning of a kernel that is worth timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .device_time import Loop


@dataclass(frozen=True)
class Variant:
    """`kernel` names which one of an op: prepare, scan or prefill (both), attend, decode, op."""

    kernel: str
    tuning: Any
    default: Any
    loop: Callable[[], Loop | None]
    check: Callable[[], float] | None = None  # relative RMS; None: nobody checks this one

    @property
    def label(self) -> str:
        """The fields that differ from the default."""
        changed = [
            f"{f.name}={getattr(self.tuning, f.name)}"
            for f in fields(self.tuning)
            if getattr(self.tuning, f.name) != getattr(self.default, f.name)
        ]
        return " ".join(changed) or "(default)"
