"""One step, as the scheduler plans it and as it is packed and dispatched."""

from __future__ import annotations

from dataclasses import dataclass, field

from .recovery import Move
from .sequence import Sequence


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a sequence to prefill.

    The state is read from `load_slot`, left in the sequence's own slot, and kept at the depths of
    `checkpoints`, each (depth, slot). `draws`: the piece completes the known tokens. `replays`: it
    only refreshes what a checkpoint omits, before the first token that is new.
    """

    sequence: Sequence
    start: int
    end: int
    load_slot: int
    checkpoints: tuple[tuple[int, int], ...]
    draws: bool
    replays: bool = False


@dataclass(frozen=True)
class Replay:
    """Group inputs of tokens [start, end) that take the state in `load_slot` (-1: zeros) to the
    sequence's own slot."""

    sequence: Sequence
    start: int
    end: int
    load_slot: int


@dataclass
class Plan:
    """A step. `restores` and copies of pages are done before it runs, `late_restores` after;
    `replays` come before `pieces`."""

    pieces: list[Piece] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    input_copies: list[tuple[int, int]] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    restores: list[Move] = field(default_factory=list)
    late_restores: list[Move] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.decode or self.replays or self.admitted)
