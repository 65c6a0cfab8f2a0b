"""A request while the engine has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache.admission import Admission
from .metrics import RequestClock
from .recovery import Move, Recovery, Span
from .request import PrefixCacheUsage, RecoveryName, Request, SamplingParams
from .text_stream import TextStream


@dataclass(eq=False)
class Sequence:
    """Prompt and output tokens of a request, and how far the device has been told to go.

        0 ........ prompt_len ........ len(tokens) .. + pending
        |---- dispatched: KV and state ----|

    `pending` draws are on the device and not read yet (the host runs one step ahead, so at most
    one when a step is planned). `limit` is the most tokens that prompt and output may have.
    """

    request: Request
    text: TextStream
    clock: RequestClock
    recovery: RecoveryName
    limit: int
    seed: int
    replay_ratio: float = 0.0
    tokens: list[int] = field(default_factory=list)
    dispatched: int = 0
    pending: int = 0
    lease: Admission | None = None
    row: int = -1
    row_params: Any = None  # RowParams as numpy: what the request says about its draws
    load_slot: int = -1  # where the next piece reads its state; -1: zeros
    restore: Move | None = None  # of a compressed state, not dispatched yet
    replay_until: int | None = None  # the depth up to which tokens only refresh what it omits
    spans: list[Span] = field(default_factory=list)  # group inputs not planned to be replayed yet
    kv_arrived: bool = True  # no KV of it is on its way from host memory
    restore_after: int | None = None  # the depth at which a replay is to be restored over
    finished: bool = False
    inexact: bool = False  # nothing computed here may be cached
    usage: PrefixCacheUsage | None = None
    reported: bool = False  # usage and prompt log-probabilities went out
    prompt_logprobs: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self._array, self._known = np.empty(self.limit, np.int32), self.prompt_len
        self._array[: self._known] = self.request.ids

    def start(self, recovery: Recovery) -> None:
        """Admitted: where to begin, and from which state."""
        self.dispatched, self.load_slot = recovery.start, recovery.load_slot
        self.restore = recovery.restore
        end = recovery.start + recovery.replay
        self.replay_until = end if recovery.replay else None
        self.spans = list(recovery.spans)
        self.restore_after = recovery.spans[0][1] if recovery.restore_after else None
        self.inexact = not recovery.cacheable

    def prefix(self, length: int) -> NDArray[np.int32]:
        """The first tokens as an array, to be read. Each is converted once."""
        if self._known < length:
            self._array[self._known : length] = self.tokens[self._known : length]
            self._known = length
        return self._array[:length]

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prefilling(self) -> bool:
        """Some known token is not dispatched, and more than a decode step would do it."""
        return self.pending == 0 and self.dispatched < len(self.tokens)

    @property
    def ready_until(self) -> int:
        """How far the next pieces may go: what a checkpoint omits is refreshed for itself."""
        return len(self.tokens) if self.replay_until is None else self.replay_until

    @property
    def can_decode(self) -> bool:
        """Exactly the last token, drawn on the device, is to be run, and another is wanted."""
        total = len(self.tokens) + self.pending
        return self.pending > 0 and self.dispatched == total - 1 and total < self.limit

    @property
    def wants_logprobs(self) -> bool:
        return self.params.logprobs is not None

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
