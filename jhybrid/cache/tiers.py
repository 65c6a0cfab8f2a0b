"""Where cached states are: in native slots or compressed ones, under one recency order.

Insertion is compressed-first: a new checkpoint is demoted at once if a compressed slot is free;
if none is, its native slot becomes the tree's without a copy. `reclaim` frees native slots when
they run short. A demotion is a transaction over one node:

    dense --begin--> demoting --commit--> compressed      the source is what hits read until
      ^------abort------'                                 commit, and cannot be evicted

(dasc, section 4.4 and appendix B.2.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from jhybrid.cache.allocator import SlotAllocator
from jhybrid.cache.radix_node import Checkpoint, Node, Refusal
from jhybrid.cache.recency import CheckpointOrder

Tier = Literal["native_slots", "compressed_slots"]


@dataclass(frozen=True, eq=False)
class Demotion:
    """The state in native slot `source` is to be packed into compressed slot `target`."""

    node: Node
    source: int
    target: int


class CheckpointTiers:
    """The checkpoints of a tree. Without `compressed` there is one tier, and the oldest is evicted.

    `lossless`: packing and unpacking gives the same state, so that what is compressed is as exact
    as what was stored.
    """

    def __init__(
        self,
        native: SlotAllocator,
        compressed: SlotAllocator | None = None,
        *,
        lossless: bool = False,
    ) -> None:
        self.native, self.compressed, self.lossless = native, compressed, lossless
        self.evicted: dict[Tier, int] = {"native_slots": 0, "compressed_slots": 0}
        self.committed = self.aborted = 0  # demotions
        self._order = CheckpointOrder()
        self._demotions: dict[Node, Demotion] = {}  # begun, and neither committed nor aborted
        self._queue: deque[Demotion] = deque()  # those of them that nobody has taken to pack
        self._locked_native = 0  # nodes with a dense checkpoint that somebody reads

    @property
    def order(self) -> CheckpointOrder:
        return self._order

    @property
    def demoting(self) -> int:
        return len(self._demotions)

    @property
    def obtainable(self) -> int:
        """Native slots that are free, or will be once everything unlocked is out of the way."""
        return self.native.free + self._order.native_count - self._locked_native

    @property
    def evicts_next(self) -> bool:
        """Whether `reclaim` would free a native slot at once, and not wait for a demotion."""
        dense = self._order.oldest_dense()
        waits = self._demotions or (self.compressed is not None and self.compressed.free)
        return dense is not None and not waits and self._order.oldest() is dense

    def exact(self, checkpoint: Checkpoint) -> bool:
        """Whether the state that is restored from it has no approximation in it."""
        return checkpoint.exact and (self.lossless or checkpoint.representation != "compressed")

    # Using

    def use(self, node: Node) -> None:
        self._order.use(node)

    def lock(self, node: Node) -> None:
        """Somebody reads the checkpoint: it is neither evicted nor demoted until `unlock`."""
        node.checkpoint_locks += 1
        self._locked_native += node.checkpoint_locks == 1 and self._in_native(node)

    def unlock(self, node: Node) -> None:
        node.checkpoint_locks -= 1
        self._locked_native -= node.checkpoint_locks == 0 and self._in_native(node)

    # Changing

    def attach(self, node: Node, checkpoint: Checkpoint) -> Refusal | None:
        """Takes the checkpoint, slot included, unless it is of another depth or there is one."""
        if checkpoint.depth != node.end or checkpoint.depth == 0:
            return "depth"
        if node.has_state:
            # The same state, computed again: it is as young as if it had just been stored.
            self._order.use(node)
            return "duplicate"
        self.native.donate(checkpoint.slot)
        node.checkpoint = checkpoint
        self._order.enter(node)
        if self.compressed is not None and self.compressed.free:
            self._begin(node)
        return None

    def drop(self, node: Node) -> Tier:
        """The one place where a checkpoint ends, whatever its representation."""
        checkpoint = node.checkpoint
        assert checkpoint is not None and not node.pinned
        if checkpoint.representation == "compressed":
            assert self.compressed is not None
            self.compressed.release(checkpoint.slot, "tree")
        else:
            self.native.release(checkpoint.slot, "tree")
        self._order.discard(node)
        node.checkpoint = replace(checkpoint, slot=-1, representation="absent")
        return "compressed_slots" if checkpoint.representation == "compressed" else "native_slots"

    def evict(self, node: Node) -> None:
        """Drops a checkpoint to make room."""
        self.evicted[self.drop(node)] += 1

    def reclaim(self, wanted: int) -> None:
        """Works towards `wanted` free native slots; those that are being demoted count as coming.

        The oldest dense checkpoint is demoted while there is compressed space. Then the oldest of
        all is evicted: if it is dense, that frees its slot; if it is compressed, the oldest dense
        one takes its place. With nothing dense that is unlocked no native slot can be freed, and
        nothing happens: whoever needs one waits.
        """
        while self.native.free + len(self._demotions) < wanted:
            oldest, dense = self._order.oldest(), self._order.oldest_dense()
            if oldest is None or dense is None:
                return
            if self.compressed is None or (not self.compressed.free and oldest is dense):
                self.evict(dense)
                continue
            if not self.compressed.free:
                self.evict(oldest)
            self._begin(dense)

    # Demotion

    def take_demotions(self, most: int) -> list[Demotion]:
        """Up to `most` demotions to pack now, oldest first. Each is committed or aborted later."""
        return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    def commit(self, demotion: Demotion) -> bool:
        """The pack is complete: the node goes over to the compressed slot, its place in the order
        unchanged. False, and nothing changes, while somebody reads the source."""
        node, checkpoint = demotion.node, demotion.node.checkpoint
        if self._demotions.get(node) is not demotion or checkpoint is None:
            raise RuntimeError(f"no demotion to slot {demotion.target} is under way")
        if node.checkpoint_locks:
            return False
        assert self.compressed is not None
        self.compressed.donate(demotion.target)
        self.native.release(demotion.source, "tree")
        node.checkpoint = replace(checkpoint, slot=demotion.target, representation="compressed")
        self._order.leave_native(node)
        del self._demotions[node]
        self.committed += 1
        return True

    def abort(self, demotion: Demotion) -> None:
        """Leaves everything as it was before the demotion, from whatever step it has come to."""
        node, checkpoint = demotion.node, demotion.node.checkpoint
        if self._demotions.pop(node, None) is not demotion or checkpoint is None:
            raise RuntimeError(f"no demotion to slot {demotion.target} is under way")
        assert self.compressed is not None
        owner = self.compressed.owner(demotion.target)
        assert owner is not None
        self.compressed.release(demotion.target, owner)
        if demotion in self._queue:
            self._queue.remove(demotion)
        node.checkpoint = replace(checkpoint, representation="dense")
        self.aborted += 1

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Recounts the checkpoints of all nodes. Raises RuntimeError with the numbers."""
        slots: dict[str, set[int]] = {"native": set(), "compressed": set()}
        stateful, locked = 0, 0
        for node in nodes:
            if node.checkpoint is None or not node.has_state:
                if node.checkpoint_locks:
                    raise RuntimeError(
                        f"{node.checkpoint_locks} users of no checkpoint at {node.end}"
                    )
                continue
            stateful += 1
            locked += node.checkpoint_locks > 0 and self._in_native(node)
            slots["native" if self._in_native(node) else "compressed"].add(node.checkpoint.slot)
            demoting = node.checkpoint.representation == "demoting"
            if demoting != (node in self._demotions):
                raise RuntimeError(f"the state at {node.end} is demoting: {demoting}, or is not")
        self.native.check_integrity("tree", slots["native"])
        if self.compressed is not None:
            self.compressed.check_integrity("tree", slots["compressed"])
            targets = {demotion.target for demotion in self._demotions.values()}
            self.compressed.check_integrity("running", targets)
        recorded = [node for node in self._order if node.attached and node.has_state]
        native = [node for node in recorded if self._in_native(node)]
        counts = len(self._order), len(recorded), len(slots["native"]) + len(slots["compressed"])
        if set(counts) != {stateful} or locked != self._locked_native:
            raise RuntimeError(
                f"counted {stateful} checkpoints, {locked} of them dense and locked; recorded "
                f"(listed, with a state, slots) {counts}, {self._locked_native} locked"
            )
        if native != self._order.native:
            raise RuntimeError(
                f"{len(native)} dense checkpoints, {len(self._order.native)} listed, or their "
                "orders differ"
            )

    def _begin(self, node: Node) -> None:
        assert self.compressed is not None and node.checkpoint is not None
        slots = self.compressed.allocate(1)
        assert slots is not None
        demotion = Demotion(node, node.checkpoint.slot, slots[0])
        node.checkpoint = replace(node.checkpoint, representation="demoting")
        self._demotions[node] = demotion
        self._queue.append(demotion)

    def _in_native(self, node: Node) -> bool:
        checkpoint = node.checkpoint
        return checkpoint is not None and checkpoint.representation in ("dense", "demoting")
