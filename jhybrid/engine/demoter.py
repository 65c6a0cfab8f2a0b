"""Demotions on their way: the cache decides, the device packs behind the steps, the host commits.

A pack is one more call in the order of the device, so the host never waits for it while requests
run; a completed one is committed before the next step is planned.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..cache.cache_manager import CacheManager
from ..cache.tiers import Demotion
from .buckets import MOVES
from .model_runner import ModelRunner


@dataclass(frozen=True)
class Pack:
    """A dispatched batch; `done` is ready when the device has packed it."""

    demotions: list[Demotion]
    done: Any  # Array


class Demoter:
    def __init__(self, cache: CacheManager, runner: ModelRunner) -> None:
        self._cache, self._runner = cache, runner
        self._packs: deque[Pack] = deque()  # in the order of the device
        self._packed: list[Demotion] = []  # complete, but the source is still being read

    def start(self) -> None:
        """Dispatch at most one batch, so that a step never has to wait for more than that."""
        demotions = self._cache.slots.take_demotions(MOVES)
        if not demotions:
            return
        try:
            done = self._runner.store_states([(d.source, d.target) for d in demotions])
        except BaseException:
            for demotion in demotions:
                self._cache.abort_demotion(demotion)
            raise
        self._packs.append(Pack(demotions, done))

    def settle(self, *, wait: bool = False) -> None:
        """Commit what is packed and no longer read, waiting for the device if asked to."""
        while self._packs and (wait or self._packs[0].done.is_ready()):
            pack = self._packs.popleft()
            pack.done.block_until_ready()
            self._packed += pack.demotions
        self._packed = [d for d in self._packed if not self._cache.commit_demotion(d)]
