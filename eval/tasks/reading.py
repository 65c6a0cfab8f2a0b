"""RULER's question answering: the passages that hold the answer among others that do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .problem import Draft
from .sources import field, locate, read_records, read_text
from .wording import Template


@dataclass(frozen=True)
class ReadingTask:
    source: str
    max_tokens: int = 32
    scorer: str = "string_match_part"


@dataclass(frozen=True)
class Question:
    """`needed` and `near` are numbers of documents: always there, and first to fill up with."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Passages:
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def load_passages(folder: Path | None, source: str) -> Passages:
    path = locate(folder, source)
    return _squad(path) if source == "squad" else _hotpotqa(path)


def _squad(path: Path) -> Passages:
    """Every distinct paragraph is a document; answerable questions only."""
    import json

    numbers: dict[str, int] = {}
    questions = []
    for article in json.loads(read_text(path))["data"]:
        paragraphs = article["paragraphs"]
        own = tuple(numbers.setdefault(p["context"], len(numbers)) for p in paragraphs)
        for paragraph, number in zip(paragraphs, own, strict=True):
            near = tuple(n for n in own if n != number)
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(dict.fromkeys(a["text"] for a in qa["answers"]))
                    questions.append(Question(qa["question"], answers, (number,), near))
    return Passages(tuple(numbers), tuple(questions))


def _hotpotqa(path: Path) -> Passages:
    """A document is a title and its sentences; all paragraphs of the item are always there."""
    numbers: dict[str, int] = {}
    questions = []
    for record in read_records(path):
        paragraphs: Any = field(record, "context", path)
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in paragraphs]
        own = tuple(dict.fromkeys(numbers.setdefault(t, len(numbers)) for t in texts))
        answer = (field(record, "answer", path),)
        questions.append(Question(field(record, "question", path), answer, own, ()))
    return Passages(tuple(numbers), tuple(questions))


def reading_draft(
    task: ReadingTask, units: int, index: int, seed: int, passages: Passages, wording: Template
) -> Draft:
    """Question number `index` among `units` documents (its own ones at least)."""
    question = passages.questions[index % len(passages.questions)]
    count = max(units, len(question.needed))
    rng = np.random.default_rng((seed, index))
    taken = set(question.needed)
    near = [n for n in question.near if n not in taken]
    near = [near[i] for i in rng.permutation(len(near))]
    known = taken | set(near)
    rest = [int(n) for n in rng.permutation(len(passages.documents)) if int(n) not in known]
    chosen = [*question.needed, *near, *rest][:count]
    order = np.random.default_rng(seed).permutation(len(chosen))
    documents = "\n\n".join(
        wording.text("document", number=i, text=passages.documents[chosen[n]])
        for i, n in enumerate(order, start=1)
    )
    instruction = wording.raw("instruction")
    return Draft(
        id=str(index),
        context=wording.text("context", instruction=instruction, documents=documents),
        question=wording.text("question", instruction=instruction, question=question.text),
        answer_prefix=wording.raw("prefix"),
        references=question.answers,
        scorer=task.scorer,
        max_tokens=task.max_tokens,
        answer=f" {question.answers[0]}",
    )
