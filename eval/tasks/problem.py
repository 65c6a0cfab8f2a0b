"""A problem: what is asked in which words, and the frozen token ids that all arms share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

Boundary = Literal["context", "question"]
_MARK = "\x00user\x00"


@dataclass(frozen=True)
class Draft:
    """A problem as text, in three parts, so that the cached prefix can end at a known place.

    `context` is what many requests may share; `question` what this one asks; `answer_prefix` opens
    the assistant's turn, which the model goes on with.
    """

    id: str
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    scorer: str
    max_tokens: int
    answer: str = ""  # a right continuation, for the likelihood of the answer
    stop: tuple[str, ...] = ()  # what ends an answer
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """A draft with frozen ids. A warm request caches the first `boundary` tokens of `prompt`."""

    id: str
    case: str
    prompt: tuple[int, ...]
    boundary: int
    answer_ids: tuple[int, ...]
    references: tuple[str, ...]
    scorer: str
    max_tokens: int
    tags: Mapping[str, Any]
    stop: tuple[str, ...] = ()

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.prompt[: self.boundary]

    @property
    def digest(self) -> str:
        """Of the ids, of where the prefix ends, of what ends the answer and of how it is scored:
        equal in two runs if the problem is."""
        data = np.array([self.boundary, *self.prompt], np.int64).tobytes()
        answer = (self.stop, self.answer_ids, self.references, self.scorer)
        return hashlib.sha256(data + repr(answer).encode()).hexdigest()[:16]

    def generating(self, max_tokens: int | None) -> Problem:
        """The same with another bound on the output; None changes nothing."""
        return self if max_tokens is None else replace(self, max_tokens=max_tokens)

    def seed(self, run_seed: int, replay: int) -> int:
        """Of the sampler: the same in every arm, different in every replay."""
        text = f"{run_seed}/{self.case}/{self.id}/{replay}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class Encoder:
    """From drafts to token ids. Parts are encoded one by one: a boundary is never inside a token.

    With `chat` the prompt is a user's message in the model's template, and the answer prefix
    begins the assistant's.
    """

    def __init__(self, tokenizer: Any, *, chat: bool = False) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = "", ""
        self._last: tuple[str, list[int]] = ("", [])  # many questions follow one long context
        self._start: list[int] = [] if chat else list(tokenizer.encode(""))
        if chat:
            message = [{"role": "user", "content": _MARK}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            self._before, self._after = text.split(_MARK)

    def ids(self, text: str) -> list[int]:
        return (
            list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
            if text
            else []
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def parts(self, draft: Draft) -> tuple[list[int], list[int], list[int]]:
        text = self._before + draft.context
        if text != self._last[0]:
            self._last = text, self.ids(text)
        context = self._start + self._last[1]
        return context, self.ids(draft.question + self._after), self.ids(draft.answer_prefix)

    def length(self, draft: Draft) -> int:
        """Tokens of the whole prompt."""
        return sum(map(len, self.parts(draft)))

    def freeze(self, draft: Draft, case: str, boundary: Boundary = "context") -> Problem:
        context, question, prefix = self.parts(draft)
        end = len(context) + (len(question) if boundary == "question" else 0)
        prompt = (*context, *question, *prefix)
        return Problem(
            id=draft.id,
            case=case,
            prompt=prompt,
            boundary=min(end, len(prompt) - 1),  # one token at least runs
            answer_ids=tuple(self.ids(draft.answer)),
            references=draft.references,
            scorer=draft.scorer,
            max_tokens=draft.max_tokens,
            tags=draft.tags,
            stop=draft.stop,
        )


def largest_that_fits(make: Callable[[int], int], limit: int, least: int, most: int) -> int:
    """The largest n in [least, most] with make(n) <= limit, by binary search.

    `make` gives the length in tokens of a prompt of n units and grows with n. Raises ValueError
    when even the least does not fit.
    """
    shortest = make(least)
    if shortest > limit:
        raise ValueError(
            f"length: the shortest prompt has {shortest} tokens, the length asked for leaves "
            f"room for {limit}: {shortest - limit} too few"
        )
    low, high, step = least, most, 1
    while high - step > low and make(high - step) > limit:  # most may be close
        high, step = high - step - 1, 2 * step
    while low < high:
        middle = (low + high + 1) // 2
        if make(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
