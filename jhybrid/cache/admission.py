"""What a running request holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from jhybrid.cache.offload import Load, StateLoad
from jhybrid.cache.radix_node import Checkpoint, Lock, PageIds, Refusal, Tokens


@dataclass(eq=False)
class Admission:
    """The lease of one running request. The manager changes it; the engine reads it every step."""

    matched: int  # tokens whose KV is reused
    restored: int  # depth of the state to start from; 0: zero state
    source: Checkpoint | None  # that state, to be read and never written; None: zero
    slot: int  # the request's own slot
    page_table: PageIds  # of [0, ...), one entry a page; replaced when it grows
    page_copies: list[tuple[int, int]]  # (src, dst) to be copied before the first step
    input_copies: list[tuple[int, int]]  # likewise of their pages of group inputs
    write_from: int  # first position whose KV the request writes
    branch_depth: int | None  # where a checkpoint helps the next request that shares the prefix
    reason: str | None  # why restored < matched, or why nothing was matched
    lock: Lock
    loads: list[Load]  # pages that come from host memory
    input_loads: list[Load]  # group inputs alone, of pages that are on the device
    state_load: StateLoad | None  # `source`, if it comes from there
    shared: int  # full pages of [0, shared) are the tree's
    tokens: Tokens  # known at admission: all of the prompt
    exact: bool  # no approximation in what it was given, nor in what it has computed
    strict: bool  # takes and gives only what is exact
    state_depth: int | None = None  # tokens the state in `slot` has consumed; None: not written

    @property
    def known(self) -> int:
        return len(self.tokens)

    def set_state_depth(self, depth: int) -> None:
        """Says that the state of `depth` tokens is written (dispatched) to `slot`."""
        if depth < 0:
            raise ValueError(f"state depth must not be negative, got {depth}")
        self.state_depth = depth


@dataclass(frozen=True)
class Commit:
    """Tokens [0, duplicate) were in the tree already, `new` ones follow.

    `refused` is why the tree did not take the state that was offered, None if it did.
    """

    new: int
    duplicate: int
    refused: Refusal | None
