"""Choices in the shapes of OpenAI's responses: completions and chat, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jhybrid.engine.detokenizer import Detokenizer, TokenBytes
from jhybrid.engine.request import RequestUpdate, TokenLogprob
from jhybrid.serve.generate import Choice, Job

LEAST_LOGPROB = -9999.0  # JSON has no -inf


class Shape(Protocol):
    """How one route words its choices."""

    object: str
    chunk_object: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        ...

    def chunk(self, choice: Choice, update: RequestUpdate) -> dict[str, Any] | None:
        """What an update adds to a stream; None when there is nothing to say."""
        ...


def envelope(job: Job, model: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"id": job.id, "object": kind, "created": job.created, "model": model}
    return {**body, "choices": choices}


class CompletionShape:
    """/v1/completions. With `echo` the first thing a choice says is its prompt."""

    object = chunk_object = "text_completion"

    def __init__(self, vocab: TokenBytes, echoes: Sequence[str] | None, job: Job) -> None:
        self._vocab = vocab
        params = job.requests[0].params
        self._with_logprobs = params.logprobs is not None
        self._skip_special = params.skip_special_tokens
        self._echo = {}
        if echoes is not None:
            per_prompt = len(job.choices) // len(echoes)
            self._echo = {c.index: echoes[c.index // per_prompt] for c in job.choices}
        self._tables: dict[int, _LogprobTable] = {}

    def whole(self, choice: Choice) -> dict[str, Any]:
        text = self._echo.get(choice.index, "") + "".join(choice.text)
        return self._choice(choice, text, choice.logprobs, first=True)

    def chunk(self, choice: Choice, update: RequestUpdate) -> dict[str, Any] | None:
        first = choice.index not in self._tables
        text = (self._echo.get(choice.index, "") if first else "") + update.text
        if not (text or update.logprobs or update.finish_reason):
            return None
        return self._choice(choice, text, update.logprobs, first)

    def _choice(
        self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob], first: bool
    ) -> dict[str, Any]:
        echo = self._echo.get(choice.index)
        if first:
            detokenizer = Detokenizer(
                self._vocab, choice.prompt_token_ids, skip_special_tokens=self._skip_special
            )
            self._tables[choice.index] = _LogprobTable(self._vocab, detokenizer, len(echo or ""))
        table = self._tables[choice.index]
        prompt = choice.prompt_logprobs if first and echo is not None else None
        fields = None
        if self._with_logprobs:
            fields = table.rows(choice.prompt_token_ids, prompt or (), logprobs)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": fields,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class _LogprobTable:
    """OpenAI's column-wise logprobs; offsets are characters into the choice's whole text."""

    def __init__(self, vocab: TokenBytes, detokenizer: Detokenizer, offset: int) -> None:
        self._vocab = vocab
        self._detokenizer = detokenizer
        self._offset = offset

    def rows(
        self,
        prompt_ids: Sequence[int],
        prompt: Sequence[TokenLogprob | None],
        output: Sequence[TokenLogprob],
    ) -> dict[str, list[Any]]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        table: dict[str, list[Any]] = {name: [] for name in names}

        def add(token_id: int, entry: TokenLogprob | None, offset: int) -> None:
            table["tokens"].append(self._vocab.token_text(token_id))
            table["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            table["top_logprobs"].append(None if entry is None else self._top(entry))
            table["text_offset"].append(offset)

        offset, text = 0, Detokenizer(self._vocab, skip_special_tokens=False)
        for token_id, entry in zip(prompt_ids, prompt, strict=False):
            add(token_id, entry, offset)
            offset += len(text.push(token_id))
        for entry in output:
            add(entry.token_id, entry, self._offset)
            self._offset += len(self._detokenizer.push(entry.token_id))
        return table

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Alternatives by text, best first; always with the token itself."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._vocab.token_text(token_id), _finite(logprob))
        return top


class ChatShape:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocab: TokenBytes, job: Job) -> None:
        self._vocab = vocab
        self._with_logprobs = job.requests[0].params.logprobs is not None
        self._begun: set[int] = set()

    def whole(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return self._choice(choice, "message", message, choice.logprobs)

    def chunk(self, choice: Choice, update: RequestUpdate) -> dict[str, Any] | None:
        delta: dict[str, Any] = {}
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta = {"role": "assistant", "content": ""}
        if update.text:
            delta["content"] = update.text
        if not (delta or update.logprobs or update.finish_reason):
            return None
        return self._choice(choice, "delta", delta, update.logprobs)

    def _choice(
        self, choice: Choice, name: str, said: dict[str, Any], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        fields = None
        if self._with_logprobs:
            fields = {"content": [self._entry(entry) for entry in logprobs], "refusal": None}
        return {
            "index": choice.index,
            name: said,
            "logprobs": fields,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._vocab.token_text(token_id), list(self._vocab[token_id])
        return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)
