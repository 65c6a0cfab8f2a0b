"""How the kernels are cut. Block sizes change speed, never results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvTuning:
    channels: int = 256  # a program; 16 bytes of bfloat16 a lane and row
    warps: int = 1
    rows: int = 32  # tokens a program of a prefill
    unrolled: int = 8  # of them whose loads are in flight together
    sequences: int = 1  # a program of a decode step

    @classmethod
    def decode(cls, batch: int) -> ConvTuning:
        return cls(sequences=1 if batch < 128 else 4)
