"""One planned step, sent to the device in the order in which the device should have it.

Decodes are first: what they take from the host then waits for no transfer. What replays read comes
next if it is in host memory, and is under way while the host makes the small arrays that programs
take from it. These are sent before any of the programs: they wait for none, nor do programs for
them. Where KV comes from host memory and nothing decodes, it is sent when the replay's are: those
of the question may come behind it, as the question does. What only a draw reads comes after the
piece that draws, so that this starts sooner.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jax import Array

from ..cache.cache_manager import CacheManager
from .host_spans import host_span
from .host_tier import HostTier
from .model_runner import ModelRunner
from .sampler import Sampled
from .scheduler import Plan
from .scores import Scored, scored_pieces
from .sequence import Sequence
from .staging import PromptInputs, ReplayInputs, make_prompt_inputs, make_replay_inputs
from .step_inputs import decode_inputs, draw_mode


@dataclass
class InFlight:
    """A dispatched step: who drew what, and prompt log-probabilities still on the device."""

    draws: list[tuple[list[Sequence | None], Sampled]]
    scored: Scored
    scores: tuple[Array, ...]


@host_span("dispatch")
def dispatch(
    plan: Plan, runner: ModelRunner, cache: CacheManager, host: HostTier, *, alone: bool
) -> InFlight:
    """`alone`: nothing decodes, so the device may wait for what comes from host memory."""
    now = time.monotonic()
    for sequence in plan.admitted:
        sequence.clock.on_scheduled(now)
    step = InFlight([], scored_pieces(plan.pieces), ())
    if plan.decode:
        batch, rows = decode_inputs(runner, plan.decode, cache.inputs)
        sampled = runner.draw(runner.decode(rows, batch), rows, draw_mode(plan.decode))
        step.draws.append((list(plan.decode), sampled))
    first, inputs = _hand_over(plan, runner, cache, host, step.scored, alone=alone)
    for copies in first.copies:
        runner.copy_pages(copies)
    host.start(first.loads)
    for moves in first.restores:
        runner.load_states(moves, keep=False)
    host.send(beside_decodes=not alone, late=not alone)
    for replay in first.replays:
        runner.replay(replay)
    if alone:
        host.settle(wait=True)
    _prefill(plan, runner, inputs, step)
    for moves in inputs.late_restores:
        runner.load_states(moves, keep=True)
    host.settle_states()
    return step


def _hand_over(
    plan: Plan,
    runner: ModelRunner,
    cache: CacheManager,
    host: HostTier,
    scored: Scored,
    *,
    alone: bool,
) -> tuple[ReplayInputs, PromptInputs]:
    """All that the step's programs take from the host, on its way; and KV, if they wait for it."""
    with host_span("make inputs"):
        loads = host.expect(plan.admitted)
        first = make_replay_inputs(runner, plan, cache.inputs, loads)
    kv_first = alone and len(loads) > 0
    if kv_first:
        first = runner.stage(first)
        host.send(beside_decodes=False, late=False)
    with host_span("make prompt inputs"):
        inputs = make_prompt_inputs(runner, plan, cache.inputs, scored)
    if kv_first:
        return first, runner.stage(inputs)
    return runner.stage((first, inputs))


def _prefill(plan: Plan, runner: ModelRunner, inputs: PromptInputs, step: InFlight) -> None:
    """Pieces of prompts and their draws, and the sampler's rows of who is new."""
    ran = None if inputs.prefill is None else runner.prefill(inputs.prefill)
    for row in inputs.rows:
        runner.set_row(row)
    for seen in inputs.seen:
        runner.set_seen(*seen)
    if ran is None:
        return
    last, hidden = ran
    if inputs.draws is not None:
        drawing = [p.sequence if p.draws else None for p in plan.pieces]
        mode = draw_mode([s for s in drawing if s is not None])
        step.draws.append((drawing, runner.draw(last, inputs.draws, mode)))
    if inputs.targets is not None:
        step.scores = runner.prompt_logprobs(hidden, inputs.targets)
