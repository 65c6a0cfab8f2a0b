"""The time given to a run: how much of it is spent, and the end that nothing outlives."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time

GRACE_SECONDS = 15.0


class Clock:
    """Starts when made. Training may use all of `seconds` but the last `reserve`."""

    def __init__(self, seconds: float, reserve: float) -> None:
        self._begin = time.monotonic()
        self._seconds = seconds
        self._training = max(seconds - reserve, seconds / 2)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        return self._seconds - self.elapsed

    @property
    def fraction(self) -> float:
        """Share of the training time that has passed; 1 or more means stop training."""
        return self.elapsed / self._training

    def stop_hard(self) -> None:
        """End the process shortly after the time is up, whatever it is doing then."""
        timer = threading.Timer(self.left + GRACE_SECONDS, _exit)
        timer.daemon = True
        timer.start()


def _exit() -> None:
    print("out of time: ending here; the output folder holds the last checkpoint", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(3)


def learning_rate(
    fraction: float, step: int, *, peak: float, final: float, hold_until: float, warmup: int
) -> float:
    """Linear warm-up by steps, then flat, then a cosine that ends with the training time."""
    down = min(max((fraction - hold_until) / (1 - hold_until), 0.0), 1.0)
    rate = final + (peak - final) * 0.5 * (1 + math.cos(math.pi * down))
    return rate * min(1.0, (step + 1) / warmup)
