"""What a user asks for, what a request is while it runs, and what comes back for it."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import NDArray

RecoveryName = Literal["dense", "dasc-nr", "dasc-wr", "tail-replay", "anchored", "zero", "off"]
FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings together: a matcher is built for every request


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class SamplingParams:
    """How to turn logits into text. Field names and meanings follow OpenAI and vLLM.

    `top_k` 0 or -1 keeps all tokens, `max_tokens` None generates up to the context's end.
    `logprobs` is the number of alternatives beside the sampled token (0 to 20), None for none;
    `prompt_logprobs` the same for the prompt's own tokens: all of them, which takes a run without
    the cache, unless the request names a recovery in `prefix_cache`; then those of cached tokens
    are None. Raises ValueError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        finite = math.isfinite
        _require(self.n >= 1, "n", self.n, "at least 1")
        temperature = self.temperature
        ok = finite(temperature) and 0 <= temperature <= 100
        _require(ok, "temperature", temperature, "a finite number from 0 to 100")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1, 0 (both: off) or positive")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(finite(value) and -2 <= value <= 2, name, value, "in [-2, 2]")
        rep = self.repetition_penalty
        _require(finite(rep) and 0 < rep <= 100, "repetition_penalty", rep, "in (0, 100]")
        seed_ok = self.seed is None or -(2**63) <= self.seed < 2**64
        _require(seed_ok, "seed", self.seed, "a 64-bit integer")
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"{len(self.logit_bias)} entries",
            f"at most {MAX_LOGIT_BIAS} entries",
        )
        for token, bias in self.logit_bias.items():
            _require(
                finite(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "in [-100, 100]"
            )
        tokens = self.max_tokens
        _require(tokens is None or tokens >= 1, "max_tokens", tokens, "at least 1, or null")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if tokens is not None:
            expected = f"at most max_tokens ({tokens})"
            _require(self.min_tokens <= tokens, "min_tokens", self.min_tokens, expected)
        for text in stop:
            _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        count, size = len(stop), sum(map(len, stop))
        few = count <= MAX_STOPS and size <= MAX_STOP_CHARACTERS
        expected = f"at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters in all"
        _require(few, "stop", f"{count} strings of {size} characters", expected)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or 0 <= value <= MAX_LOGPROBS
            _require(ok, name, value, f"0 to {MAX_LOGPROBS}, or null")


@dataclass(frozen=True)
class PrefixCacheOptions:
    """A request's own choice of recovery; None leaves the server's."""

    recovery: RecoveryName | None = None
    replay_ratio: float | None = None


@dataclass(frozen=True)
class Request:
    """One sequence to generate. `n` > 1 is expanded into `n` of these before the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prefix_cache: PrefixCacheOptions = PrefixCacheOptions()
    arrival_time: float = 0.0  # seconds, time.monotonic()

    @functools.cached_property
    def ids(self) -> NDArray[np.int64]:
        """`prompt_token_ids`, converted once. Raises ValueError where one is not an integer of 64
        bits."""
        ids = self.prompt_token_ids
        try:  # two thirds of the time that numpy takes
            return np.frombuffer(struct.pack(f"={len(ids)}q", *ids), np.int64)
        except struct.error:
            wrong = next(x for x in ids if not _is_id(x))
            raise ValueError(f"prompt: expected token ids of 64 bits, got {wrong!r}") from None


def _is_id(x: object) -> bool:
    return isinstance(x, SupportsIndex) and -(2**63) <= x.__index__() < 2**63


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token and of the best alternatives at its position, best first.

    Values are of the model's distribution after penalties and bias, before temperature and
    truncation. `top` holds (token id, log-probability) pairs; it need not hold the token itself.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PrefixCacheUsage:
    """What the prefix cache did for a request (design words: matched, restored, replayed)."""

    recovery: RecoveryName
    matched_tokens: int = 0
    restored_tokens: int = 0
    replayed_tokens: int = 0
    reason: str | None = None
    cached_tokens: int = 0  # prompt tokens that did not go through a prefill


@dataclass(frozen=True)
class RequestUpdate:
    """What one engine step added to a request.

    `text` is new text that is final: complete UTF-8 characters, nothing that could still turn
    out to be part of a stop string, never a stop string itself. `token_ids` and `logprobs` are
    the step's new tokens and may run ahead of `text`. `prefix_cache` and `prompt_logprobs` come
    with the first update; `prompt_logprobs[0]` is None. After `finish_reason` nothing follows;
    `error` says why when it is "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prefix_cache: PrefixCacheUsage | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; `retry_after` is in seconds."""

    def __init__(self, waiting: int, limit: int, retry_after: float = 1.0) -> None:
        super().__init__(f"{waiting} requests are waiting, the limit is {limit} (--max-queue)")
        self.limit = limit
        self.retry_after = retry_after
