"""What the programs of a planned step take from the host, made before they are dispatched.

A program's small array that is handed over at its call waits for the programs dispatched before,
and maybe for transfers, and the device idles until it is there. What replays take is staged ahead
of KV, and what a question takes ahead of that of the upper layers. Decodes, copies of pages and
restores bring their own: little is sent before them, and the host would be longer in staging it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Int32

from ..cache.input_pages import InputPages
from ..packed import Packed, pack
from .buckets import MOVES
from .host_spans import host_span
from .model_runner import ModelRunner, pairs
from .plan import Plan
from .recovery import Move
from .scores import Scored, prompt_targets
from .step_inputs import at_position, prefill_inputs, replay_inputs, seen_tokens

Moves = tuple[Int32[Array, " M"], Int32[Array, " M"]]  # sources and targets, -1 for none


@struct.dataclass
class PromptInputs:
    """Arguments of the runner's calls behind the replays, in numpy and, once staged, on the device;
    a list has one entry for each call. N sequences in T packed tokens."""

    prefill: Packed | None
    rows: list[Packed]
    seen: list[tuple[Array, Array, Array]]
    draws: Int32[Array, " N"] | None  # the row of each sequence, -1 for none
    targets: Int32[Array, " T"] | None
    late_restores: list[Moves]


def packed_replays(runner: ModelRunner, plan: Plan, inputs: InputPages | None) -> list[Packed]:
    """A ReplayBatch each, in numpy."""
    if not plan.replays:
        return []
    assert inputs is not None
    return [pack(batch) for batch in replay_inputs(runner, plan.replays, inputs)]


@host_span("make prompt inputs")
def make_prompt_inputs(
    runner: ModelRunner, plan: Plan, inputs: InputPages | None, scored: Scored
) -> PromptInputs:
    """`scored`: as `scored_pieces` says."""
    prefill: Any = None
    draws: Any = None
    targets: Any = None
    if plan.pieces:
        batch, rows = prefill_inputs(runner, plan.pieces, inputs, scored=bool(scored))
        prefill = pack(batch)
        draws = rows if any(piece.draws for piece in plan.pieces) else None
        targets = prompt_targets(scored, batch.token_ids.size) if scored else None
    seen: list[Any] = [
        (np.int32(s.row), *seen_tokens(s, runner.vocab)) for s in plan.admitted if s.has_penalties
    ]
    return PromptInputs(
        prefill=prefill,
        rows=[pack((np.int32(s.row), at_position(s))) for s in plan.admitted],
        seen=seen,
        draws=draws,
        targets=targets,
        late_restores=state_moves(plan.late_restores),
    )


def page_copies(plan: Plan, runner: ModelRunner) -> list[Packed]:
    """Of KV pages and of pages of group inputs, of which there are not more."""
    width = runner.buckets.decode[-1]
    both = plan.page_copies, plan.input_copies
    starts = range(0, len(plan.page_copies), width)
    return [pack([pairs(c[start : start + width], width) for c in both]) for start in starts]


def state_moves(moves: list[Move]) -> list[Any]:
    """Pairs of slots, in numpy, of each call that moves some."""
    return [pairs(moves[start : start + MOVES], MOVES) for start in range(0, len(moves), MOVES)]
