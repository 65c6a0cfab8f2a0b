"""One HTTP request as engine requests, and their updates as choices and usage."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from jhybrid.engine.request import (
    FinishReason,
    PrefixCacheOptions,
    PrefixCacheUsage,
    Request,
    RequestUpdate,
    SamplingParams,
    TokenLogprob,
)
from jhybrid.serve.errors import ApiError, context_too_long, internal, invalid, unavailable
from jhybrid.serve.protocol import leading_field


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    prompt_token_ids: tuple[int, ...]
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prefix_cache: PrefixCacheUsage | None = None

    def take(self, update: RequestUpdate) -> None:
        if update.prefix_cache is not None:
            self.prefix_cache = update.prefix_cache
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.text.append(update.text)
        self.logprobs.extend(update.logprobs)
        self.completion_tokens += len(update.token_ids)
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason


class Job:
    """The sequences of one HTTP request: `n` choices of every prompt, numbered prompt by prompt.

    `params` has one entry per prompt; they differ only in `max_tokens`.
    """

    def __init__(
        self,
        prefix: str,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache: PrefixCacheOptions,
        *,
        prompt_only: bool = False,
    ) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.requests: list[Request] = []
        self._choices: dict[str, Choice] = {}
        self._per_prompt = params[0].n
        self._prompt_only = prompt_only
        now = time.monotonic()
        for prompt, own in zip(map(tuple, prompts), params, strict=True):
            for i in range(own.n):
                choice = Choice(len(self.requests), prompt)
                request_id = f"{self.id}-{choice.index}"
                one = replace(own, n=1, seed=_seed(own.seed, i))
                self.requests.append(Request(request_id, prompt, one, cache, now))
                self._choices[request_id] = choice

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def take(self, update: RequestUpdate) -> tuple[Choice, RequestUpdate]:
        """Account for an update; raises ApiError when the engine gave the sequence up."""
        if update.finish_reason == "error":
            raise internal(update.error or "generation failed")
        if update.finish_reason == "abort":
            raise unavailable(update.error or "the request was aborted by the server")
        if self._prompt_only:
            reason = update.finish_reason and "length"
            update = replace(
                update, token_ids=(), text="", logprobs=(), finish_reason=reason, stop_reason=None
            )
        choice = self._choices[update.request_id]
        choice.take(update)
        return choice, update

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many choices it has; so does its cache hit."""
        firsts = self.choices[:: self._per_prompt]
        hits = [first.prefix_cache for first in firsts if first.prefix_cache is not None]
        prompt = sum(len(first.prompt_token_ids) for first in firsts)
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(hit.cached_tokens for hit in hits)},
            "prefix_cache": _prefix_cache(hits),
        }


def fit_context(params: SamplingParams, prompt: list[int], limit: int, name: str) -> SamplingParams:
    """The params with max_tokens cut to what the context still holds after the prompt."""
    room = limit - len(prompt)
    if room < 1:
        raise context_too_long(len(prompt), limit, name)
    if params.max_tokens is None or params.max_tokens <= room:
        if params.min_tokens > room:
            raise invalid(f"min_tokens must be at most {room} with this prompt", "min_tokens")
        return params
    try:
        return replace(params, max_tokens=room)
    except ValueError as error:
        raise invalid(str(error), leading_field(error)) from None


def check_token_ids(prompt: list[int], vocab_size: int, name: str) -> None:
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        position = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        param = f"{name}[{position}]"
        message = f"{param}: token id {prompt[position]} is not from 0 to {vocab_size - 1}"
        raise invalid(message, param)


def engine_refusal(error: ValueError) -> ApiError:
    return invalid(str(error), leading_field(error))


def _seed(seed: int | None, choice: int) -> int | None:
    """Choices of one prompt differ, and each can be asked for again alone by its own seed."""
    if seed is None:
        return None
    return seed + choice if seed + choice < 2**64 else seed + choice - 2**64


def _prefix_cache(hits: list[PrefixCacheUsage]) -> dict[str, Any] | None:
    if not hits:
        return None
    return {
        "recovery": hits[0].recovery,
        "matched_tokens": sum(hit.matched_tokens for hit in hits),
        "restored_tokens": sum(hit.restored_tokens for hit in hits),
        "replayed_tokens": sum(hit.replayed_tokens for hit in hits),
        "reason": next((hit.reason for hit in hits if hit.reason is not None), None),
    }
