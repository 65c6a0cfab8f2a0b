"""Multi-turn traces with the published shape of the WildChat experiment, fixed before any run.

256 conversations of four turns; first prompts of 1k to 8k tokens, contexts of at most 16k, as many
generated tokens as the recorded reply has, at most 1,024. The history of a turn holds the recorded
replies, not the generated ones, so that every server is sent the same token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jhybrid.config import require

from ..tasks.sources import field, read_records

Rng = np.random.Generator


@dataclass(frozen=True)
class Turn:
    prompt: tuple[int, ...]  # the whole context, of which earlier turns are a prefix
    decode: int  # tokens to generate


Conversation = tuple[Turn, ...]


@dataclass(frozen=True)
class Shape:
    """In tokens. `scale` shortens all lengths for small models."""

    conversations: int = 256
    turns: int = 4
    first: tuple[int, int] = (1024, 8192)
    context: int = 16384
    decode: int = 1024
    scale: float = 1.0

    def scaled(self, tokens: float) -> int:
        return max(1, round(tokens * self.scale))


def generated(shape: Shape, vocabulary: Sequence[int], seed: int) -> list[Conversation]:
    """A stand-in without text: first messages log-uniform, later ones and replies log-normal.

    Medians (60 and 300) and sigmas (1.2 and 0.8) are chosen to come near WildChat's means.
    """
    ids = np.asarray(vocabulary, np.int64)
    out = []
    for number in range(shape.conversations):
        rng = np.random.default_rng((seed, number))
        low, high = np.log(shape.first)
        asked = [float(np.exp(rng.uniform(low, high)))]
        asked += [_log_normal(rng, 60, 1.2, 4, 1024) for _ in range(shape.turns - 1)]
        replies = [_log_normal(rng, 300, 0.8, 16, shape.decode) for _ in range(shape.turns)]
        out.append(_conversation(shape, rng, ids, asked, replies))
    return out


def _log_normal(rng: Rng, median: float, sigma: float, low: int, high: int) -> float:
    return float(np.clip(rng.lognormal(np.log(median), sigma), low, high))


def _conversation(
    shape: Shape, rng: Rng, ids: np.ndarray, asked: list[float], replies: list[float]
) -> Conversation:
    """Growth stops at the largest context: what does not fit any more is cut to one token."""
    limit = shape.scaled(shape.context)
    context: list[int] = []
    turns = []
    for question, reply in zip(asked, replies, strict=True):
        left = shape.turns - len(turns)  # a token for each message and reply still to come
        room = limit - len(context) - 2 * left + 1
        size = max(1, min(shape.scaled(question), room))
        context += rng.choice(ids, size).tolist()
        decode = max(1, min(shape.scaled(reply), limit - len(context) - 2 * left + 2))
        turns.append(Turn(tuple(context), decode))
        context += rng.choice(ids, decode).tolist()
    return tuple(turns)


def from_log(path: Path, shape: Shape, tokenizer: Any) -> list[Conversation]:
    """The first conversations of a WildChat-like file (JSON lines) that have the shape.

    Of a row only `conversation`, and of its messages only role and content, are read.
    """
    found: list[Conversation] = []
    for record in read_records(path):
        messages = [(m["role"], m["content"]) for m in field(record, "conversation", path)]
        conversation = _recorded(messages, shape, tokenizer)
        if conversation is not None:
            found.append(conversation)
        if len(found) == shape.conversations:
            return found
    expected = f"{shape.conversations} conversations of the shape {shape}"
    raise ValueError(f"{path}: expected {expected}, found {len(found)}")


def _recorded(messages: list[tuple[str, str]], shape: Shape, tokenizer: Any) -> Conversation | None:
    """None for a conversation of another shape."""
    roles = ["user", "assistant"] * shape.turns
    if [role for role, _ in messages] != roles:
        return None
    chat = [{"role": role, "content": content} for role, content in messages]
    turns = []
    for n in range(shape.turns):
        prompt = tokenizer.apply_chat_template(
            chat[: 2 * n + 1], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        reply = tokenizer.encode(chat[2 * n + 1]["content"], add_special_tokens=False)
        decode = max(1, min(len(reply), shape.scaled(shape.decode)))
        if len(prompt) + decode > shape.scaled(shape.context):
            return None
        turns.append(Turn(tuple(prompt), decode))
    low, high = map(shape.scaled, shape.first)
    return tuple(turns) if low <= len(turns[0].prompt) <= high else None


def digest(conversations: Iterable[Conversation]) -> str:
    """Of all ids and lengths: the same trace has the same one."""
    hasher = hashlib.sha256()
    for conversation in conversations:
        for turn in conversation:
            hasher.update(np.array([turn.decode, *turn.prompt], np.int64).tobytes())
    return hasher.hexdigest()[:16]


def plain_ids(tokenizer: Any) -> list[int]:
    """All token ids but the special ones."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [i for i in range(len(tokenizer)) if i not in special]


def largest_context(conversations: Iterable[Conversation]) -> int:
    return max(len(turn.prompt) + turn.decode for c in conversations for turn in c)


def check(conversations: Sequence[Conversation], max_context: int | None) -> None:
    """Refuse a trace that the server cannot hold, before minutes of running."""
    longest = largest_context(conversations)
    fits = max_context is None or longest <= max_context
    require(fits, "trace", f"a context of {longest} tokens", f"at most {max_context}")
