"""Output tokens of one request to final text: detokeniser, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jhybrid.engine.detokenizer import Detokenizer, TokenBytes
from jhybrid.engine.request import SamplingParams
from jhybrid.engine.stop import StopMatcher


class TextDelta(NamedTuple):
    """New final text; `stop` is the stop string that ends the request, never part of `text`."""

    text: str
    stop: str | None = None


class TextStream:
    """Push every output token but a terminating one (EOS, stop token id), then `finish` once.

    After a delta with `stop` the stream is over: neither push nor finish.
    """

    def __init__(
        self, vocab: TokenBytes, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._detokenizer = Detokenizer(
            vocab, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._tokens = 0

    def push(self, token_id: int) -> TextDelta:
        self._tokens += 1
        return self._match(self._detokenizer.push(token_id))

    def finish(self) -> TextDelta:
        """Everything still held back, once it is known that no token follows."""
        text, stop = self._match(self._detokenizer.finish())
        if stop is None and self._matcher is not None:
            text += self._matcher.finish()
        return TextDelta(text, stop)

    def _match(self, text: str) -> TextDelta:
        if self._matcher is None:
            return TextDelta(text)
        armed = self._tokens >= self._min_tokens
        return TextDelta(*self._matcher.push(text, armed=armed))
