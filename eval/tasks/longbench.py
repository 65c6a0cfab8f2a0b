"""LongBench (v1) reading tasks from local files: its own format, or that of the source data sets.

Too long a context loses its middle: the first and last halves of the token budget are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jhybrid.config import require

from .problem import Boundary, Draft, Encoder, Problem
from .sources import field, locate, read_records
from .wording import Wording


@dataclass(frozen=True)
class LongBenchTask:
    max_tokens: int
    scorer: str = "token_f1"


TASKS = {
    "narrativeqa": LongBenchTask(128),
    "qasper": LongBenchTask(128),
    "hotpotqa": LongBenchTask(32),
    "musique": LongBenchTask(32),
    "qmsum": LongBenchTask(512, "rouge_l"),
}


@dataclass(frozen=True)
class Record:
    id: str
    input: str
    context: str
    answers: tuple[str, ...]


def load(folder: Path | None, name: str) -> list[Record]:
    require(name in TASKS, "task", name, f"one of {', '.join(TASKS)}")
    path = locate(folder, name)
    return [r for record in read_records(path) for r in _records(record, path)]


def _records(record: dict[str, Any], path: Path) -> Iterator[Record]:
    """A record of LongBench, MuSiQue, HotpotQA or QMSum, by its fields."""
    if "paragraphs" in record:
        passages = [f"{p['title']}\n{p['paragraph_text']}" for p in record["paragraphs"]]
        answers = (record["answer"], *record.get("answer_aliases", ()))
        yield Record(str(record["id"]), record["question"], _passages(passages), answers)
    elif "meeting_transcripts" in record:
        turns = [f"{t['speaker']}: {t['content']}" for t in record["meeting_transcripts"]]
        queries = [*record["general_query_list"], *record["specific_query_list"]]
        for number, query in enumerate(queries):
            name, answers = f"{record.get('id', '')}/{number}", (query["answer"],)
            yield Record(name, query["query"], "\n".join(turns), answers)
    elif isinstance(record.get("context"), list):
        passages = [f"{title}\n{''.join(lines)}" for title, lines in record["context"]]
        answers = (record["answer"],)
        yield Record(str(record["_id"]), record["question"], _passages(passages), answers)
    else:
        answers = tuple(field(record, "answers", path))
        text = field(record, "context", path)
        yield Record(str(field(record, "_id", path)), field(record, "input", path), text, answers)


def _passages(texts: list[str]) -> str:
    return "\n".join(f"Passage {i}:\n{text}" for i, text in enumerate(texts, start=1))


def problems(
    records: list[Record],
    name: str,
    encoder: Encoder,
    wording: Wording,
    max_length: int,
    boundary: Boundary = "context",
) -> Iterator[Problem]:
    """Prompts of at most `max_length` tokens; the generated ones come on top."""
    task, text = TASKS[name], wording.task(name)
    for number, record in enumerate(records):
        draft = Draft(
            id=f"{number}/{record.id}",
            context=text.text("context", context=record.context),
            question=text.text("question", input=record.input),
            answer_prefix=text.raw("prefix"),
            references=record.answers,
            scorer=task.scorer,
            max_tokens=task.max_tokens,
            answer=f" {record.answers[0]}",
        )
        problem = encoder.freeze(draft, f"{name}/{max_length}", boundary)
        yield cut_middle(problem, max_length)


def cut_middle(problem: Problem, max_length: int) -> Problem:
    """Keep the first and the last half of `max_length` tokens of a longer prompt.

    The boundary moves with the text behind it, which is kept.
    """
    extra = len(problem.prompt) - max_length
    if extra <= 0:
        return problem
    half = max_length // 2
    prompt = problem.prompt[:half] + problem.prompt[-half:]
    suffix = len(problem.prompt) - problem.boundary
    require(suffix < half, "max_length", max_length, f"more than twice the question's {suffix}")
    return replace(problem, prompt=prompt, boundary=len(prompt) - suffix)
