"""Whether a request ends with a token, and the text that it gives."""

from __future__ import annotations

from typing import NamedTuple

from .request import FinishReason
from .sequence import Sequence


class Pushed(NamedTuple):
    """Final text; why the request ends, if it does; the stop string or token that ended it."""

    text: str
    reason: FinishReason | None
    stop: str | int | None


def push_token(sequence: Sequence, token: int, eos: frozenset[int]) -> Pushed:
    """What follows from the last token of `sequence`, which is in its `tokens` already."""
    reason: FinishReason | None = None
    stop: str | int | None = None
    ending = token in ending_tokens(sequence, eos)
    if ending and sequence.generated > sequence.params.min_tokens:
        text, reason = "", "stop"
        stop = token if token in sequence.params.stop_token_ids else None
    else:
        text, stop = sequence.text.push(token)
        if stop is not None:
            reason = "stop"
        elif len(sequence.tokens) >= sequence.limit:
            reason = "length"
    if reason is not None and not isinstance(stop, str):
        rest, found = sequence.text.finish()
        text += rest
        if found is not None:
            reason, stop = "stop", found
    return Pushed(text, reason, stop)


def ending_tokens(sequence: Sequence, eos: frozenset[int]) -> frozenset[int]:
    stops = frozenset(sequence.params.stop_token_ids)
    return stops if sequence.params.ignore_eos else stops | eos
