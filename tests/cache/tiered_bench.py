"""Checkpoint tiers without a tree: nodes of one token each, named by a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jhybrid.cache.allocator import SlotAllocator
from jhybrid.cache.radix_node import Checkpoint, Node
from jhybrid.cache.tiers import CheckpointTiers, Demotion


class TieredBench:
    def __init__(self, native: int, compressed: int):
        self._set(CheckpointTiers(SlotAllocator(native), SlotAllocator(compressed)))

    @classmethod
    def of(cls, tiers: CheckpointTiers) -> TieredBench:
        bench = cls.__new__(cls)
        bench._set(tiers)
        return bench

    def _set(self, tiers: CheckpointTiers) -> None:
        assert tiers.compressed is not None
        self.tiers, self.native, self.compressed = tiers, tiers.native, tiers.compressed
        self.nodes: dict[int, Node] = {}

    @staticmethod
    def node(name: int) -> Node:
        empty = np.empty(0, np.int32)
        root = Node(serial=0, start=0, tokens=empty, pages=empty)
        return Node(name, 0, np.array([name], np.int32), np.zeros(1, np.int32), root)

    def store(self, *names: int) -> list[int]:
        """New checkpoints, as requests donate them; their native slots."""
        taken = []
        for name in names:
            slots = self.native.allocate(1)
            assert slots is not None
            self.nodes[name] = self.node(name)
            assert self.tiers.attach(self.nodes[name], Checkpoint(slots[0], 1)) is None
            taken += slots
        self.check()
        return taken

    def use(self, name: int) -> None:
        self.tiers.use(self.nodes[name])

    def drop(self, name: int) -> None:
        self.tiers.drop(self.nodes[name])

    def take(self) -> list[Demotion]:
        return self.tiers.take_demotions(100)

    def settle(self, order: Sequence[int] | None = None) -> None:
        """Everything that is being demoted is packed, in this order."""
        taken = self.take()
        for index in order or range(len(taken)):
            assert self.tiers.commit(taken[index])
        self.check()

    def states(self) -> dict[int, str]:
        """Representations, least recently used first."""
        return {
            node.serial: c.representation for node in self.tiers.order if (c := node.checkpoint)
        }

    def checkpoints(self) -> list[Checkpoint | None]:
        return [node.checkpoint for node in self.tiers.order]

    @property
    def evicted(self) -> tuple[int, int]:
        return self.tiers.evicted["native_slots"], self.tiers.evicted["compressed_slots"]

    def check(self) -> None:
        self.tiers.check_integrity(self.nodes.values())
