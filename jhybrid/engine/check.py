"""What a request must satisfy before it is queued. ValueError names the field."""

from __future__ import annotations

from numbers import Real

from ..config import require
from .config import EngineConfig
from .request import Request
from .sampler import MAX_BANNED


def check_request(
    request: Request,
    config: EngineConfig,
    *,
    max_context: int,
    vocab_size: int,
    eos: frozenset[int],
) -> None:
    prompt, params = request.prompt_token_ids, request.params
    require(len(prompt) > 0, "prompt", prompt, "at least one token")
    most = max_context - 1
    require(len(prompt) <= most, "prompt", f"{len(prompt)} tokens", f"at most {most} tokens")
    low = int(request.ids.min())
    worst = low if low < 0 else int(request.ids.max())
    expected = f"ids from 0 to {vocab_size - 1}"
    require(0 <= worst < vocab_size, "prompt", f"token id {worst}", expected)
    for field in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, field):
            require(0 <= token < vocab_size, field, token, f"token {expected}")
    banned = len(set(params.stop_token_ids) | eos)
    few = params.min_tokens == 0 or banned <= MAX_BANNED
    require(few, "stop_token_ids", f"{banned} ids", f"at most {MAX_BANNED} with min_tokens")
    recovery, possible = request.prefix_cache.recovery, config.recoveries
    known = recovery is None or recovery in possible
    require(known, "prefix_cache.recovery", recovery, f"one of {', '.join(possible)}")
    ratio = request.prefix_cache.replay_ratio
    number = isinstance(ratio, Real) and not isinstance(ratio, bool)
    known = ratio is None or (number and 0 <= ratio <= 1)
    require(known, "prefix_cache.replay_ratio", ratio, "a number from 0 to 1")
