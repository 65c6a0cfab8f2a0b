"""What runs in the next step: decode for all that can, prefill up to the token budget.

The scheduler holds no arrays. It plans one step, and is told when the step has been dispatched;
from then on the device will have done it before anything later, so the tree may know of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..cache.admission import Admission
from ..cache.cache_manager import CacheManager
from .request import PrefixCacheUsage
from .sequence import Sequence


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a sequence to prefill.

    The state is read from `load_slot`, left in the sequence's own slot, and kept at the depths of
    `checkpoints`, each (depth, slot). `draws`: the piece completes the known tokens.
    """

    sequence: Sequence
    start: int
    end: int
    load_slot: int
    checkpoints: tuple[tuple[int, int], ...]
    draws: bool


@dataclass
class Plan:
    pieces: list[Piece] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.decode)


class Scheduler:
    def __init__(
        self,
        cache: CacheManager,
        *,
        max_running: int,
        max_prefill_tokens: int,
        max_prefill_sequences: int,
        caching: bool,
    ) -> None:
        self.cache = cache
        self.max_prefill_tokens = max_prefill_tokens
        self.max_prefill_sequences = max_prefill_sequences
        self.caching = caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0
        self._free_rows = list(range(max_running))[::-1]

    def schedule(self) -> Plan:
        plan = Plan()
        for sequence in list(self.running):
            if sequence.lease is not None and sequence.can_decode:
                if self._make_room(sequence):
                    plan.decode.append(sequence)
        # A victim is younger than whoever needed its pages, but may have been planned before.
        plan.decode = [s for s in plan.decode if s.lease is not None]
        budget = self.max_prefill_tokens
        for sequence in self._to_prefill(plan):
            if budget == 0 or len(plan.pieces) == self.max_prefill_sequences:
                break
            piece = self._piece(sequence, budget)
            plan.pieces.append(piece)
            budget -= piece.end - piece.start
        return plan

    def _to_prefill(self, plan: Plan) -> Iterator[Sequence]:
        """Sequences with prompt left: those running first, then new ones as they are admitted."""
        yield from [s for s in self.running if s.prefilling]
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            if sequence.pending:  # preempted, and its last draw is still on the device
                return
            if not self._admit(sequence, plan):
                return
            yield sequence

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """All or nothing: a row, a slot and the pages of every known token, or stay queued."""
        tokens = sequence.tokens
        # Cached positions have no logits: prompt log-probabilities need every token run, unless
        # the request itself asks for a recovery; then it gets those of the tokens that do run.
        chosen = sequence.request.prefix_cache.recovery is not None
        scored = sequence.params.prompt_logprobs is not None and sequence.generated == 0
        fresh = scored and not chosen
        reuse = sequence.recovery != "off" and not fresh
        total = min(len(tokens) + 1, sequence.limit)
        lease = self.cache.admit(tokens, len(tokens) - 1, reuse, total)
        if lease is None:
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.lease, sequence.row = lease, self._free_rows.pop()
        if sequence.recovery == "zero" and lease.matched:
            sequence.dispatched, sequence.load_slot = lease.matched, -1
            sequence.inexact = True
        else:
            sequence.dispatched, sequence.load_slot = lease.restored, lease.source_slot
        if sequence.usage is None:  # coming back after a preemption does not change the answer
            sequence.usage = _usage(sequence, lease)
        plan.admitted.append(sequence)
        plan.page_copies += lease.page_copies
        return True

    def _piece(self, sequence: Sequence, budget: int) -> Piece:
        lease = sequence.lease
        assert lease is not None
        start, end = sequence.dispatched, min(len(sequence.tokens), sequence.dispatched + budget)
        first = lease.state_depth is None
        return Piece(
            sequence,
            start,
            end,
            load_slot=sequence.load_slot if first else lease.slot,
            checkpoints=self._checkpoints(sequence, lease, start, end),
            draws=end == len(sequence.tokens),
        )

    def _checkpoints(
        self, sequence: Sequence, lease: Admission, start: int, end: int
    ) -> tuple[tuple[int, int], ...]:
        """Depths of this piece whose state is kept, with the slots there are for them.

        When slots are short, the end of the prompt and the branch come before the grid.
        """
        if not self.caching or sequence.inexact:
            return ()
        last = len(sequence.tokens) - 1
        depths = self.cache.checkpoint_depths(lease, start, end, len(sequence.tokens))
        depths.sort(key=lambda depth: (depth not in (last, lease.branch_depth), -depth))
        reserve = min(len(self.waiting), len(self._free_rows))
        slots = self.cache.reserve_checkpoint_slots(len(depths), reserve)
        return tuple(sorted(zip(depths, slots, strict=False)))

    def _make_room(self, sequence: Sequence) -> bool:
        """Pages for one more token, preempting the youngest until there are."""
        while sequence.lease is not None:
            if self.cache.grow(sequence.lease, sequence.dispatched + 1):
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue. What it computed goes to the tree, and is a hit when it
        comes back unless the pages were needed in the meantime."""
        self.preemptions += 1
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        lease = sequence.lease
        assert lease is not None
        keep = self.caching and not sequence.inexact
        self.cache.finish(lease, sequence.tokens[: sequence.dispatched], donate=keep)
        self._free_rows.append(sequence.row)
        self.running.remove(sequence)
        sequence.lease, sequence.row, sequence.dispatched = None, -1, 0

    def dispatched(self, plan: Plan) -> None:
        """The step is on its way: advance, and let the tree know what will be there."""
        for piece in plan.pieces:
            sequence, lease = piece.sequence, piece.sequence.lease
            assert lease is not None
            sequence.dispatched = piece.end
            sequence.pending += piece.draws
            lease.set_state_depth(piece.end)
            self.cache.release_source(lease)
            if not self.caching or sequence.inexact:
                continue
            for depth, slot in piece.checkpoints:
                self.cache.commit_prefix(lease, sequence.tokens[:depth], (slot, depth))
            if piece.draws:
                self.cache.commit_prefix(lease, sequence.tokens[: piece.end])
        for sequence in plan.decode:
            assert sequence.lease is not None
            sequence.dispatched += 1
            sequence.pending += 1
            sequence.lease.set_state_depth(sequence.dispatched)

    def finish(self, sequence: Sequence) -> None:
        """Finished or aborted, wherever it is."""
        sequence.finished = True
        if sequence.lease is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


def _usage(sequence: Sequence, lease: Admission) -> PrefixCacheUsage:
    zero = sequence.recovery == "zero"
    restored = 0 if zero else lease.restored
    return PrefixCacheUsage(
        recovery=sequence.recovery,
        matched_tokens=lease.matched,
        restored_tokens=restored,
        replayed_tokens=0,
        reason=lease.reason,
        cached_tokens=lease.matched if zero else restored,
    )
