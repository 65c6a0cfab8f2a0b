"""Native slots to be written: by requests that run, and with the checkpoints that they leave."""

from __future__ import annotations

from collections.abc import Iterable

from jhybrid.cache.tiers import CheckpointTiers, Demotion


class NativeSlots:
    """Hands out slots of the native pool, making room among the checkpoints in `tiers`.

    `watermark` slots are kept free, as far as demotion and eviction can.
    """

    def __init__(self, tiers: CheckpointTiers, watermark: int = 0) -> None:
        total = tiers.native.total
        if not 0 <= watermark < total:
            raise ValueError(f"watermark must be from 0 to {total - 1}, got {watermark}")
        self.watermark = watermark
        self._tiers, self._slots = tiers, tiers.native
        self._reserved: set[int] = set()  # for checkpoints, not committed yet

    @property
    def reserved(self) -> frozenset[int]:
        return frozenset(self._reserved)

    @property
    def waits(self) -> bool:
        """Whether `take` would give none now, though one may be on its way."""
        return not (self._slots.free or self._tiers.evicts_next)

    def take(self) -> int | None:
        """A slot for a request; None when every one is in use or still being demoted."""
        if not self._slots.free:
            self._tiers.reclaim(1)
        slots = self._slots.allocate(1)
        return slots[0] if slots else None

    def make_room(self) -> None:
        """Starts to free one, for whoever waits."""
        self._tiers.reclaim(1)

    def release(self, slot: int) -> None:
        """Gives back a request's slot, or a claimed one."""
        self._slots.release(slot, "running")

    def reserve(self, n: int, floor: int = 0) -> list[int]:
        """Up to `n` slots to write checkpoints to, evicting least recently used ones.

        Leaves at least `floor` slots that are free or can be freed for running requests. Every
        slot is claimed when its checkpoint is committed, or given up.
        """
        taken = [self.take() for _ in range(min(n, self._tiers.obtainable - floor))]
        slots = [slot for slot in taken if slot is not None]
        self._reserved.update(slots)
        return slots

    def claim(self, slot: int) -> None:
        """The reserved slot has been written. ValueError if it is not a reserved one."""
        if slot not in self._reserved:
            raise ValueError(f"slot {slot} is not reserved for a checkpoint")
        self._reserved.remove(slot)

    def give_up(self, slots: Iterable[int]) -> None:
        """Frees reserved slots that nothing was committed from."""
        for slot in slots:
            self.claim(slot)
            self.release(slot)

    def take_demotions(self, most: int) -> list[Demotion]:
        """Up to `most` demotions to pack now, after seeing to it that slots are free."""
        self._tiers.reclaim(self.watermark)
        return self._tiers.take_demotions(most)
