"""One planned step, sent to the device in the order in which the device should have it.

Decodes are first: what they take from the host then waits for no transfer. What only a draw reads
comes after the piece that draws, so that this starts sooner.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jax import Array

from ..cache.cache_manager import CacheManager
from ..packed import Packed, pack
from .host_tier import HostTier
from .model_runner import ModelRunner
from .sampler import Sampled
from .scheduler import Plan
from .scores import Scored, prompt_targets
from .sequence import Sequence
from .step_inputs import (
    at_position,
    decode_inputs,
    draw_mode,
    prefill_inputs,
    replay_inputs,
    seen_tokens,
)


@dataclass
class InFlight:
    """A dispatched step: who drew what, and prompt log-probabilities still on the device."""

    draws: list[tuple[list[Sequence | None], Sampled]]
    scored: Scored
    scores: tuple[Array, ...]


def dispatch(
    plan: Plan, runner: ModelRunner, cache: CacheManager, host: HostTier, *, alone: bool
) -> InFlight:
    """`alone`: nothing decodes, so the device may wait for what comes from host memory."""
    now = time.monotonic()
    for sequence in plan.admitted:
        sequence.clock.on_scheduled(now)
    step = InFlight([], [], ())
    if plan.decode:
        batch, rows = decode_inputs(runner, plan.decode, cache.inputs)
        sampled = runner.draw(runner.decode(rows, batch), rows, draw_mode(plan.decode))
        step.draws.append((list(plan.decode), sampled))
    if plan.page_copies:
        runner.copy_pages(plan.page_copies, plan.input_copies)
    replays = list[tuple[Packed, int]]()
    if plan.replays:
        assert cache.inputs is not None
        batches = list(replay_inputs(runner, plan.replays, cache.inputs))
        sizes = [batch.token_ids.size for batch in batches]
        coming = host.expects(plan.admitted)
        packed = runner.stage(batches) if coming else [pack(batch) for batch in batches]
        replays += zip(packed, sizes, strict=True)
    host.start(plan.admitted)
    if plan.restores:
        runner.load_states(plan.restores, keep=False)
    host.send(beside_decodes=not alone)
    for batch, tokens in replays:
        runner.replay(batch, tokens)
    if alone:
        host.settle(wait=True)
    _prefill(plan, runner, cache, step)
    if plan.late_restores:
        runner.load_states(plan.late_restores, keep=True)
    host.settle_states()
    return step


def _prefill(plan: Plan, runner: ModelRunner, cache: CacheManager, step: InFlight) -> None:
    """Pieces of prompts and their draws, and the sampler's rows of who is new."""
    ran = None
    if plan.pieces:
        batch, rows = prefill_inputs(runner, plan.pieces, cache.inputs)
        ran = rows, *runner.prefill(batch)
    for sequence in plan.admitted:
        runner.set_row(sequence.row, at_position(sequence))
        if sequence.has_penalties:
            runner.set_seen(sequence.row, *seen_tokens(sequence, runner.vocab))
    if ran is None:
        return
    rows, last, hidden = ran
    drawing = [p.sequence if p.draws else None for p in plan.pieces]
    if any(drawing):
        mode = draw_mode([s for s in drawing if s is not None])
        step.draws.append((drawing, runner.draw(last, rows, mode)))
    step.scored, targets = prompt_targets(plan.pieces, hidden.shape[0])
    if step.scored:
        step.scores = runner.prompt_logprobs(hidden, targets)
