"""How the kernels are cut. Block sizes change speed, never results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax import Array

from ..triton import dividing_block


@dataclass(frozen=True)
class ConvTuning:
    channels: int = 128  # of a head, a program; 16 bytes of bfloat16 a lane and row
    warps: int = 1
    rows: int = 64  # tokens a program of a prefill
    unrolled: int = 4  # of them whose loads are in flight together
    sequences: int = 1  # a program of a decode step

    @classmethod
    def prefill(cls, tokens: int) -> ConvTuning:
        """A program waits for memory once for every few rows: fewer rows and more programs, as long
        as all of them fit on the device at once."""
        if tokens <= 64:
            return cls(rows=8, unrolled=8)
        return cls(rows=32, unrolled=8) if tokens <= 2048 else cls()

    @classmethod
    def decode(cls, batch: int) -> ConvTuning:
        return cls(sequences=1 if batch < 128 else 4)

    def cut(self, weight: Array) -> tuple[ConvTuning, int, int]:
        """(blocks that divide a head, heads, blocks of a head) for weight [H, W, J]."""
        heads, width = weight.shape[:2]
        channels = dividing_block(width, self.channels)
        return replace(self, channels=channels), heads, width // channels
