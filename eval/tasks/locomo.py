"""LoCoMo: questions on ten long conversations, each the shared prefix of all its questions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jhybrid.config import require

from .problem import Boundary, Draft, Encoder, Problem
from .sources import field, locate, read_records
from .wording import Template, Wording

MAX_TOKENS = 50
TEMPORAL, ADVERSARIAL = 2, 5  # categories
_SESSION = re.compile(r"session_(\d+)")


def load(folder: Path | None) -> list[dict[str, Any]]:
    return read_records(locate(folder, "locomo"))


def serialize(conversation: dict[str, Any], text: Template, oldest: int = 0) -> str:
    """All sessions in order, with their dates; the `oldest` turns are left out."""
    numbers = sorted(int(m[1]) for name in conversation if (m := _SESSION.fullmatch(name)))
    out = [text.text("opening", a=conversation["speaker_a"], b=conversation["speaker_b"])]
    for number in numbers:
        turns = conversation[f"session_{number}"]
        kept, oldest = turns[oldest:], max(0, oldest - len(turns))
        if kept:
            lines = "".join(_turn(turn, text) for turn in kept)
            date = conversation[f"session_{number}_date_time"]
            out.append(text.text("session", date=date, turns=lines))
    return "".join(out)


def _turn(turn: dict[str, Any], text: Template) -> str:
    shared = turn.get("blip_caption")
    caption = text.text("caption", caption=shared) if shared else ""
    return text.text("turn", speaker=turn["speaker"], text=turn["text"], caption=caption)


def gold(qa: dict[str, Any], path: str) -> str:
    """The answer; for category 5, which has none, `adversarial_answer`."""
    answer = qa.get("answer", qa.get("adversarial_answer"))
    require(answer is not None, f"{path}: answer", None, "an answer or an adversarial_answer")
    return str(answer)


def problems(
    conversations: list[dict[str, Any]],
    encoder: Encoder,
    wording: Wording,
    max_length: int,
    boundary: Boundary = "context",
) -> Iterator[Problem]:
    """Each conversation's questions, all behind the same prefix of at most `max_length` tokens.

    Where it is too long, the oldest turns go: as many as the longest question needs.
    """
    text = wording.task("locomo")
    for record in conversations:
        conversation = field(record, "conversation", Path("locomo"))
        questions = list(enumerate(record["qa"]))
        drafts = [_draft(record["sample_id"], n, qa, text) for n, qa in questions]
        longest = max(encoder.length(draft) for draft in drafts)
        context = _fitted(conversation, text, encoder, max_length - longest - MAX_TOKENS)
        for draft in drafts:
            whole = Draft(**{**vars(draft), "context": context})
            yield encoder.freeze(whole, "locomo", boundary)


def _draft(sample: str, number: int, qa: dict[str, Any], text: Template) -> Draft:
    answer, category = gold(qa, f"{sample}/{number}"), int(qa["category"])
    hint = text.raw("temporal_hint") if category == TEMPORAL else ""
    return Draft(
        id=f"{sample}/{number}",
        context="",
        question=text.text("question", question=qa["question"], hint=hint),
        answer_prefix=text.raw("prefix"),
        references=(answer,),
        scorer="token_f1",
        max_tokens=MAX_TOKENS,
        answer=f" {answer}",
        tags={"category": category},
    )


def _fitted(conversation: dict[str, Any], text: Template, encoder: Encoder, room: int) -> str:
    """The conversation with as few of its oldest turns left out as fits `room` tokens."""
    low, high = 0, sum(len(v) for k, v in conversation.items() if _SESSION.fullmatch(k))
    while low < high:
        middle = (low + high) // 2
        if len(encoder.ids(serialize(conversation, text, middle))) <= room:
            high = middle
        else:
            low = middle + 1
    return serialize(conversation, text, low)
