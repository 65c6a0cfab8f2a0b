"""What runs in the next step: decode for all that can, prefill up to the token budget.

The scheduler holds no arrays. It plans one step, and is told when the step has been dispatched;
from then on the device will have done it before anything later, so the tree may know of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..cache.admission import Admission
from ..cache.cache_manager import CacheManager
from .buckets import Buckets
from .host_spans import host_span
from .plan import Piece, Plan, Replay
from .recovery import STRICT, ReplayRules, choose
from .sequence import Sequence


class Scheduler:
    def __init__(
        self,
        cache: CacheManager,
        *,
        max_running: int,
        max_prefill_tokens: int,
        buckets: Buckets,
        caching: bool,
        replay_window: int = 0,
        max_replays: int = 1,
        exact_inputs: bool = True,
    ) -> None:
        """`buckets`: they say how many sequences a step prefills, and how many of their tokens.
        `replay_window`: tokens that a refresh runs at most. `max_replays`: sequences that replay
        group inputs in one step. `exact_inputs`: those are kept as they were computed."""
        self.cache = cache
        self.max_prefill_tokens = max_prefill_tokens
        self.buckets = buckets
        self.replay_window, self.max_replays = replay_window, max_replays
        self.caching, self.exact_inputs = caching, exact_inputs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0
        self._free_rows = list(range(max_running))[::-1]

    @property
    def decoding(self) -> bool:
        """Whether some draw is on the device, behind which a request decodes. One that comes back
        after a preemption has generated tokens and none: it waits for its KV as a prompt does."""
        return any(s.pending for s in self.running)

    def schedule(self, *, kv_arrives: bool = False) -> Plan:
        """`kv_arrives`: before any piece runs, KV that is on its way will be in its pages."""
        plan = Plan()
        for sequence in list(self.running):
            if sequence.lease is not None and sequence.can_decode:
                if self._make_room(sequence):
                    plan.decode.append(sequence)
        # A victim is younger than whoever needed its pages, but may have been planned before.
        plan.decode = [s for s in plan.decode if s.lease is not None]
        budget, ready, waiting = self.max_prefill_tokens, list[Sequence](), list[tuple[int, bool]]()
        for sequence in self._to_prefill(plan):
            waits = not (sequence.kv_arrived or kv_arrives)
            if waits and not sequence.spans:
                continue
            if budget == 0 or len(ready) == self.buckets.prefill_sequences[-1]:
                break
            if sequence.spans:
                if len(plan.replays) == self.max_replays:
                    break
                budget -= self._replay(sequence, budget, plan)
                if sequence.spans or sequence.restore_after is not None or waits:
                    continue
                if budget == 0:
                    break
            ready.append(sequence)
            # All that it waits for, even if less is left: a long prompt goes alone or not at all.
            size = min(self.max_prefill_tokens, sequence.ready_until - sequence.dispatched)
            waiting.append((size, sequence.dispatched == 0))
            if self.buckets.is_full(waiting):
                break
        self._add_pieces(plan, ready, min(budget, self.buckets.prefill_step(waiting)))
        return plan

    def _to_prefill(self, plan: Plan) -> Iterator[Sequence]:
        """Sequences with prompt left: those running first, then new ones as they are admitted."""
        yield from [s for s in self.running if s.prefilling]
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            # One that was preempted may have its last draw on the device still.
            if sequence.pending or not self._admit(sequence, plan):
                return
            yield sequence

    @host_span("admit")
    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """All or nothing: a row, a slot and the pages of every known token, or stay queued."""
        tokens = sequence.prefix(len(sequence.tokens))
        # Cached positions have no logits: prompt log-probabilities need every token run, unless
        # the request itself asks for a recovery; then it gets those of the tokens that do run.
        scored = sequence.params.prompt_logprobs is not None and sequence.generated == 0
        fresh = scored and sequence.request.prefix_cache.recovery is None
        reuse = sequence.recovery != "off" and not fresh
        strict = fresh or sequence.recovery in STRICT
        total = min(len(tokens) + 1, sequence.limit)
        lease = self.cache.admit(tokens, len(tokens) - 1, reuse, total, strict=strict)
        if lease is None:
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.lease, sequence.row = lease, self._free_rows.pop()
        rules = ReplayRules(sequence.replay_ratio, self.cache.inputs_kept, self.exact_inputs)
        recovery = choose(sequence.recovery, lease, self.replay_window, rules)
        sequence.start(recovery)
        sequence.kv_arrived = not lease.loads
        if lease.state_load is not None:
            lease.state_load.read = recovery.load_slot == lease.state_load.slot
        lease.exact = lease.exact and recovery.exact
        if sequence.usage is None:  # coming back after a preemption does not change the answer
            sequence.usage = recovery.usage
        plan.admitted.append(sequence)
        plan.page_copies += lease.page_copies
        plan.input_copies += lease.input_copies
        if recovery.restore is not None and not (recovery.replay or recovery.restore_after):
            plan.restores.append(recovery.restore)
        return True

    def _replay(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Plans as much of the sequence's next span as the budget allows; returns its length."""
        assert sequence.lease is not None
        (start, end), *rest = sequence.spans
        stop = min(end, start + budget)
        plan.replays.append(Replay(sequence, start, stop, sequence.load_slot))
        sequence.spans = [(stop, end), *rest] if stop < end else rest
        sequence.load_slot = sequence.lease.slot
        if stop == sequence.restore_after:
            assert sequence.restore is not None
            plan.late_restores.append(sequence.restore)
        return stop - start

    def _add_pieces(self, plan: Plan, ready: list[Sequence], budget: int) -> None:
        for sequence in ready:
            if budget == 0:
                return  # it stays admitted, and comes first in a later step
            piece = self._piece(sequence, budget)
            plan.pieces.append(piece)
            if piece.replays and piece.end == sequence.replay_until:
                assert sequence.restore is not None
                plan.late_restores.append(sequence.restore)
            budget -= piece.end - piece.start

    def _piece(self, sequence: Sequence, budget: int) -> Piece:
        lease = sequence.lease
        assert lease is not None
        start, load_slot = sequence.dispatched, sequence.load_slot
        end = min(sequence.ready_until, start + budget)
        if sequence.replay_until is not None:
            return Piece(sequence, start, end, load_slot, (), draws=False, replays=True)
        return Piece(
            sequence,
            start,
            end,
            load_slot,
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
        slots = self.cache.slots.reserve(len(depths), reserve)
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
        done = min(sequence.dispatched, len(sequence.tokens))  # a step that failed told nothing
        if not sequence.kv_arrived:  # what is still on its way is nowhere yet
            done = min(done, lease.shared)
            sequence.kv_arrived = True
        self.cache.finish(lease, sequence.prefix(done), donate=keep)
        self._free_rows.append(sequence.row)
        self.running.remove(sequence)
        sequence.lease, sequence.row, sequence.dispatched = None, -1, 0

    def dispatched(self, plan: Plan) -> None:
        """The step is on its way: advance, and let the tree know what will be there."""
        for sequence in plan.admitted:
            waits = sequence.replay_until is not None or sequence.restore_after is not None
            if sequence.restore is not None and not waits:
                self._restored(sequence)
        for replay in plan.replays:
            sequence, lease = replay.sequence, replay.sequence.lease
            assert lease is not None
            if replay.end == sequence.restore_after:
                self._restored(sequence)
                continue
            lease.set_state_depth(replay.end)
            if sequence.restore is None:
                self.cache.release_source(lease)
        for piece in plan.pieces:
            sequence, lease = piece.sequence, piece.sequence.lease
            assert lease is not None
            sequence.dispatched, sequence.load_slot = piece.end, lease.slot
            if piece.replays:
                if piece.end == sequence.replay_until:
                    self._restored(sequence)
                continue
            sequence.pending += piece.draws
            lease.set_state_depth(piece.end)
            self.cache.release_source(lease)
            if not self.caching or sequence.inexact:
                continue
            self.cache.keep_loaded(lease, sequence.prefix(piece.end))
            for depth, slot in piece.checkpoints:
                self.cache.commit_prefix(lease, sequence.prefix(depth), (slot, depth))
            if piece.draws:
                self.cache.commit_prefix(lease, sequence.prefix(piece.end))
        for sequence in plan.decode:
            assert sequence.lease is not None
            sequence.dispatched += 1
            sequence.pending += 1
            sequence.lease.set_state_depth(sequence.dispatched)

    def failed(self, plan: Plan) -> set[str]:
        """The step is on its way in part, or not: what states and pages of its sequences hold,
        nobody knows. Gives their requests, which are to be ended; nothing of them is kept."""
        for piece in plan.pieces:
            self.cache.slots.give_up([slot for _, slot in piece.checkpoints])
        parts = (*plan.pieces, *plan.replays)
        sequences = (*plan.decode, *plan.admitted, *(part.sequence for part in parts))
        for sequence in sequences:
            sequence.inexact = True
        return {sequence.request.request_id for sequence in sequences}

    def _restored(self, sequence: Sequence) -> None:
        """The compressed state is in the sequence's own slot, and whole."""
        lease = sequence.lease
        assert lease is not None
        lease.set_state_depth(lease.restored)
        self.cache.release_source(lease)
        sequence.restore = sequence.replay_until = sequence.restore_after = None

    def finish(self, sequence: Sequence) -> None:
        """Finished or aborted, wherever it is."""
        sequence.finished = True
        if sequence.lease is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
