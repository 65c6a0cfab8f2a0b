"""A training row: token ids with one loss weight each, built piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .tokenizer import END_OF_TEXT, encode

ANSWER_WEIGHT = 5.0  # what must be recalled or worked out
BALANCE = 0.15  # of a balanced row: what its answers weigh together, for each token of the row
BALANCE_LIMITS = (2.0, 16.0)  # of one token's weight
CONTEXT_WEIGHT = 0.03  # the rest of such a row: random keys and numbers teach nothing
PROSE_WEIGHT = 1.0
DECISIVE = 8.0  # times the weight of its answer: the token that no other token gives away


@dataclass(frozen=True)
class Row:
    """`weights[i]` is the weight of predicting `ids[i]` from what stands before it.

    `answers` are the half-open spans of `ids` whose content follows from earlier tokens, `decisive`
    the tokens of them that weigh more than the rest, and `boundary` is where the text ends that
    they are about and the questions begin.
    """

    ids: np.ndarray  # uint16 [T + 1]
    weights: np.ndarray  # float32 [T + 1]
    answers: tuple[tuple[int, int], ...]
    decisive: tuple[int, ...] = ()
    boundary: int | None = None


@dataclass
class RowBuilder:
    """Collects pieces up to `size` tokens; `finish` cuts or pads to exactly that."""

    size: int
    _ids: list[np.ndarray] = field(default_factory=list)
    _weights: list[tuple[float, int]] = field(default_factory=list)
    _answers: list[tuple[int, int]] = field(default_factory=list)
    _decisive: list[int] = field(default_factory=list)
    used: int = 0
    boundary: int | None = None

    @property
    def room(self) -> int:
        return self.size - self.used

    def add(self, piece: str | np.ndarray | int, weight: float = CONTEXT_WEIGHT) -> RowBuilder:
        if isinstance(piece, int):
            piece = np.array([piece], np.uint16)
        ids = encode(piece) if isinstance(piece, str) else piece
        self._ids.append(ids)
        self._weights.append((weight, len(ids)))
        self.used += len(ids)
        return self

    def answer(
        self,
        piece: str | np.ndarray,
        weight: float = ANSWER_WEIGHT,
        decisive: int | None = None,
    ) -> RowBuilder:
        """`decisive`: which token of it the others follow from, as those of a number that stands
        in the row do once its first digit is known: left alone they would be most of the loss."""
        start = self.used
        self.add(piece, weight)
        if decisive is not None:
            self._decisive.append(start + decisive)
        self._answers.append((start, self.used))
        return self

    def ids(self) -> np.ndarray:
        """What was added so far."""
        return np.concatenate(self._ids)

    def text(self) -> str:
        """What was added so far, as text; only for rows without markers."""
        return bytes(self.ids().astype(np.uint8)).decode(errors="replace")

    def finish(self, *, balanced: bool = False) -> Row:
        """The row. Padding has weight 0; an answer that does not fit whole is no answer.

        In a balanced row few answers weigh as much as many, so that no task drowns another.
        """
        if self.room > 0:
            self.add(np.full(self.room, END_OF_TEXT, np.uint16), 0.0)
        values, counts = zip(*self._weights, strict=True)
        ids = np.concatenate(self._ids)[: self.size]
        weights = np.repeat(np.array(values, np.float32), counts)[: self.size]
        answers = tuple(a for a in self._answers if a[1] <= self.size)
        if balanced and answers:
            tokens = sum(stop - start for start, stop in answers)
            weight = np.clip(BALANCE * self.size / tokens, *BALANCE_LIMITS)
            for start, stop in answers:
                weights[start:stop] = weight
        decisive = tuple(at for at in self._decisive if any(a <= at < b for a, b in answers))
        weights[list(decisive)] *= DECISIVE
        boundary = self.boundary if self.boundary and self.boundary < self.size else None
        return Row(ids, weights, answers, decisive, boundary)
