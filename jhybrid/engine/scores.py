"""The log-probabilities that requests ask for: of the tokens drawn, and of their prompts."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from jaxtyping import Int32

from .plan import Piece
from .request import TokenLogprob

Scored = list[tuple[Piece, int]]  # pieces of a step, with the first row of each


def token_logprob(
    token: int, own: float, top: Items[int], top_logprobs: Items[float], wanted: int | None
) -> TokenLogprob:
    pairs = zip(top[:wanted], top_logprobs[:wanted], strict=True)
    return TokenLogprob(int(token), float(own), tuple((int(t), float(p)) for t, p in pairs))


def scored_pieces(pieces: list[Piece]) -> Scored:
    """Those whose prompts are scored."""
    asking, at = [], 0
    for piece in pieces:
        s = piece.sequence
        if s.params.prompt_logprobs is not None and not s.reported and not piece.replays:
            asking.append((piece, at))
        at += piece.end - piece.start
    return asking


def prompt_targets(scored: Scored, rows: int) -> Int32[np.ndarray, " T"]:
    """The token that follows each, in a step of that many rows."""
    targets = np.zeros(rows, np.int32)
    for piece, at in scored:
        following = piece.sequence.tokens[piece.start + 1 : piece.end + 1]
        targets[at : at + len(following)] = following
    return targets


def keep_prompt_scores(piece: Piece, at: int, scores: tuple[np.ndarray, ...]) -> None:
    """Gives the sequence what rows `at` and on say: (log-probability, best tokens, theirs)."""
    sequence = piece.sequence
    own, top, top_logprobs = scores
    count = min(piece.end, sequence.prompt_len - 1) - piece.start
    # A prompt that was preempted half-way runs, and reports, from its start again; one that
    # starts behind a cached prefix has nothing to report of that.
    del sequence.prompt_logprobs[piece.start :]
    missing = piece.start - len(sequence.prompt_logprobs)
    sequence.prompt_logprobs += [None] * missing
    for n in range(at, at + count):
        token = sequence.tokens[piece.start + 1 + n - at]
        wanted = sequence.params.prompt_logprobs
        found = token_logprob(token, own[n], top[n], top_logprobs[n], wanted)
        sequence.prompt_logprobs.append(found)
