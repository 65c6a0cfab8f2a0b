"""Final-answer mathematics: AIME and HMMT (MathArena's fields), IMO-AnswerBench (its CSV)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jhybrid.config import require

from ..scoring.answers import needs_judge
from .problem import Boundary, Draft, Encoder, Problem
from .sources import field, locate, read_records
from .wording import Wording

MAX_TOKENS = 16384


@dataclass(frozen=True)
class Columns:
    """Names of the fields with the number, the problem, the answer and the category."""

    number: str
    problem: str
    answer: str
    category: str | None = None


TASKS = {
    "aime": Columns("problem_idx", "problem", "answer"),
    "hmmt": Columns("problem_idx", "problem", "answer"),
    "imo": Columns("Problem ID", "Problem", "Short Answer", "Category"),
}


def problems(
    folder: Path | None,
    name: str,
    encoder: Encoder,
    wording: Wording,
    boundary: Boundary = "question",
) -> Iterator[Problem]:
    """All items of the file. The tag `judge` marks answers in words, for a judge to grade."""
    require(name in TASKS, "task", name, f"one of {', '.join(TASKS)}")
    columns, path, text = TASKS[name], locate(folder, name), wording.task(name)
    for record in read_records(path):
        answer = str(field(record, columns.answer, path)).strip()
        draft = Draft(
            id=str(field(record, columns.number, path)),
            context="",
            question=text.text("question", problem=str(record[columns.problem]).strip()),
            answer_prefix=text.raw("prefix"),
            references=(answer,),
            scorer="math",
            max_tokens=MAX_TOKENS,
            answer=f"\\boxed{{{answer.strip('$')}}}",
            tags={
                "judge": needs_judge(answer),
                "category": record.get(columns.category or "", ""),
            },
        )
        yield encoder.freeze(draft, name, boundary)
