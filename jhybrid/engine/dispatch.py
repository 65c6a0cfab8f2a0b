"""One planned step, sent to the device in the order in which the device should have it.

Decodes are first: what they take from the host then waits for no transfer. Copies of pages and what
replays take come next, from host memory or made here, then, if nothing decodes, KV of the lower
layers, and then the replays: the host makes what the question takes while the device replays. See
`host_tier` for the order of transfers. What only a draw reads comes after the piece that draws, so
that this starts sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jax import Array

from ..cache.cache_manager import CacheManager
from .host_spans import host_span
from .host_tier import STEP_PARTS, HostTier
from .model_runner import ModelRunner
from .plan import Plan
from .sampler import Sampled
from .scores import Scored, scored_pieces
from .sequence import Sequence
from .staging import PromptInputs, make_prompt_inputs, packed_replays, page_copies, state_moves
from .step_inputs import decode_lines, draw_mode


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
        hidden, rows = runner.decode(decode_lines(runner, plan.decode, cache.inputs))
        sampled = runner.draw(hidden, rows, draw_mode(plan.decode))
        step.draws.append((list(plan.decode), sampled))
    for copies in page_copies(plan, runner):
        runner.copy_pages(copies)
    pages = host.expect(plan.admitted)
    replays = runner.stage(packed_replays(runner, plan, cache.inputs))
    if alone:
        host.send_lower()
    for moves in state_moves(plan.restores):
        runner.load_states(moves, keep=False)
    if not alone:
        host.send(most=STEP_PARTS)
    for replay in replays:
        runner.replay(replay)
    inputs = make_prompt_inputs(runner, plan, cache.inputs, step.scored)
    inputs, pages = runner.stage((inputs, pages))
    host.hold(pages)
    if alone:
        host.put_lower()
        host.send_upper()
    _prefill(runner, plan, inputs, step, host.put_upper if alone else lambda: None)
    for moves in inputs.late_restores:
        runner.load_states(moves, keep=True)
    host.settle_states()
    return step


def _prefill(
    runner: ModelRunner,
    plan: Plan,
    inputs: PromptInputs,
    step: InFlight,
    between: Callable[[], None],
) -> None:
    """Pieces of prompts and their draws, and the sampler's rows of who is new."""
    ran = None
    if inputs.prefill is None:
        between()
    else:
        ran = runner.prefill(inputs.prefill, between)
    for row in inputs.rows:
        runner.set_row(row)
    for seen in inputs.seen:
        runner.set_seen(*seen)
    if ran is None:
        return
    last, stream = ran
    if inputs.draws is not None:
        drawing = [p.sequence if p.draws else None for p in plan.pieces]
        mode = draw_mode([s for s in drawing if s is not None])
        step.draws.append((drawing, runner.draw(last, inputs.draws, mode)))
    if inputs.targets is not None:
        assert inputs.prefill is not None
        step.scores = runner.prompt_logprobs(inputs.prefill, stream, inputs.targets)
