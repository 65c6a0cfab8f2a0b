"""An engine without a model: it writes tokens where a real one would write KV and states.

A page cell holds the token whose KV it is, a slot the tokens its state has consumed, a compressed
slot likewise. So whatever the cache says can be checked by reading it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jhybrid.cache.admission import Admission
from jhybrid.cache.cache_manager import CacheManager
from jhybrid.cache.tiers import Demotion

UNWRITTEN = -1


def tokens_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@dataclass(eq=False)
class Running:
    """A request between admission and finish. Tokens [0, done) have KV and state."""

    tokens: list[int]
    prompt_len: int
    lease: Admission
    done: int = 0
    started: bool = False


class SimulatedEngine:
    """Runs requests on a CacheManager and checks what it reads. `reserve` is the slot floor."""

    def __init__(
        self,
        total_pages=64,
        page_size=4,
        total_slots=8,
        checkpoint_interval=8,
        reserve=0,
        **tiers: Any,
    ):
        self.manager = CacheManager(
            total_pages, page_size, total_slots, checkpoint_interval, **tiers
        )
        self.reserve = reserve
        self.packed: list[tuple[int, ...] | None] = [None] * tiers.get("compressed_slots", 0)
        self.packing: list[Demotion] = []  # packed, and not committed
        self.pages = np.full((total_pages, page_size), UNWRITTEN)
        self.slots: list[tuple[int, ...] | None] = [None] * total_slots
        self.running: list[Running] = []
        self.stored: list[list[int]] = []  # tokens of the states stored by the latest step
        self.prefilled = 0  # prompt tokens run, replayed ones included

    def admit(
        self, tokens: Sequence[int], limit: int | None = None, reuse=True, tokens_total=0
    ) -> Running | None:
        tokens = list(tokens)
        limit = len(tokens) - 1 if limit is None else limit
        lease = self.manager.admit(tokens, limit, reuse, tokens_total)
        if lease is None:
            return None
        request = Running(tokens, len(tokens), lease, done=lease.restored)
        self.running.append(request)
        self.check_lease(request)
        return request

    def step(self, request: Running, end: int, commit=True) -> bool:
        """Runs tokens [done, end), storing what states it can. False when there is no room."""
        lease, start = request.lease, request.done
        if not self.manager.grow(lease, end):
            return False
        if not request.started:
            self._start(request)
        depths = self.manager.checkpoint_depths(lease, start, end, request.prompt_len)
        slots = self.manager.slots.reserve(len(depths), self.reserve)
        kept = list(zip(depths[len(depths) - len(slots) :], slots, strict=True))
        for position in range(max(start, lease.write_from), end):
            page, offset = divmod(position, self.manager.page_size)
            self.pages[lease.page_table[page], offset] = request.tokens[position]
        assert self.spelled(lease.page_table, end) == request.tokens[:end]
        for depth, slot in kept:
            self.slots[slot] = tuple(request.tokens[:depth])
        self.slots[lease.slot] = tuple(request.tokens[:end])
        lease.set_state_depth(end)
        request.done = end
        self.prefilled += max(0, min(end, request.prompt_len) - start)
        self.stored = [request.tokens[:depth] for depth, _ in kept]
        for depth, slot in kept:
            taken = self.manager.commit_prefix(lease, request.tokens[:depth], (slot, depth))
            assert taken.refused in (None, "duplicate")
        if commit:
            self.manager.commit_prefix(lease, request.tokens[:end])
        return True

    def advance(self, tokens: int) -> int:
        """Every request that runs by so many tokens; those at their end end. How many did."""
        finished = 0
        for request in list(self.running):
            if request.done == len(request.tokens):
                self.finish(request)
                finished += 1
            else:
                assert self.step(request, min(request.done + tokens, len(request.tokens)))
        return finished

    def pack(self, most: int = 100) -> int:
        """Takes demotions and writes their compressed slots; how many."""
        taken = self.manager.slots.take_demotions(most)
        for demotion in taken:
            self.packed[demotion.target] = self.slots[demotion.source]
        self.packing += taken
        return len(taken)

    def settle(self) -> None:
        """Commits what is packed and has no readers."""
        self.packing = [d for d in self.packing if not self.manager.commit_demotion(d)]

    def finish(self, request: Running, donate=True) -> None:
        self.running.remove(request)
        depth = request.done if request.started else 0
        self.manager.finish(request.lease, request.tokens[:depth], donate)

    def run(self, tokens: Sequence[int], answer: Sequence[int] = ()) -> Admission:
        """One request alone from admission to finish, demotions included; its admission."""
        request = self.admit(tokens, tokens_total=len(tokens) + len(answer))
        assert request is not None
        assert self.step(request, request.prompt_len)
        for token in answer:
            request.tokens.append(token)
            assert self.step(request, len(request.tokens), commit=False)
        self.finish(request)
        while self.pack():
            self.settle()
        return request.lease

    def spelled(self, page_table: Any, length: int) -> list[int]:
        return self.pages[page_table].reshape(-1)[:length].tolist()

    def check_lease(self, request: Running) -> None:
        """What the admission promises is there: KV of [0, matched), the state of [0, restored)."""
        lease = request.lease
        table = list(lease.page_table)
        for src, dst in lease.page_copies:
            table[table.index(dst)] = src
        depth = request.done if request.started else lease.matched
        assert self.spelled(table, depth) == request.tokens[:depth]
        if request.started:
            assert self.slots[lease.slot] == tuple(request.tokens[: request.done])
        elif lease.restored:
            assert self.source(lease) == tuple(request.tokens[: lease.restored])
        else:
            assert lease.source is None

    def source(self, lease: Admission) -> tuple[int, ...] | None:
        """What the state holds that the request is to start from."""
        if lease.source is None:
            return ()
        compressed = lease.source.representation == "compressed"
        return (self.packed if compressed else self.slots)[lease.source.slot]

    def check_all(self) -> dict[tuple[int, ...], bool]:
        """Reads everything cached and held. Returns the tree: prefix -> has a checkpoint."""
        self.manager.check_integrity()
        for request in self.running:
            self.check_lease(request)
        tree = self.manager.pools.tree
        ends: dict[object, tuple[int, ...]] = {}
        for node in tree.walk():
            above = ends[node.parent] if node.start else ()
            ends[node] = prefix = (*above, *node.tokens.tolist())
            assert self.spelled(tree.page_table(node).tolist(), node.end) == list(prefix)
            if node.checkpoint is not None and node.has_state:
                compressed = node.checkpoint.representation == "compressed"
                assert (self.packed if compressed else self.slots)[node.checkpoint.slot] == prefix
        return {ends[node]: node.has_state for node in tree.walk()}

    def _start(self, request: Running) -> None:
        """The first step: copies pages, starts from the source state, lets go of both."""
        lease = request.lease
        for src, dst in lease.page_copies:
            self.pages[dst] = self.pages[src]
        self.slots[lease.slot] = self.source(lease)
        lease.set_state_depth(lease.restored)
        request.started = True
        self.manager.release_source(lease)
