"""Multiple choice: MMLU-Pro (JSON lines) and GPQA-Diamond (its CSV), from the user's files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .problem import Boundary, Draft, Encoder, Problem
from .sources import field, locate, read_records
from .wording import Template, Wording

LETTERS = "ABCDEFGHIJ"
MAX_TOKENS = 2048
SHUFFLE_SEED = 0  # of GPQA's options; fixed, so that every arm and run sees the same letters


def mmlu_pro(
    folder: Path | None,
    encoder: Encoder,
    wording: Wording,
    *,
    shots: int = 0,
    max_length: int,
    boundary: Boundary = "question",
) -> Iterator[Problem]:
    """All items of the file. `shots` worked examples of the category, fewer where they don't fit.

    Examples come from the validation file, and are only looked for when asked for.
    """
    path, text = locate(folder, "mmlu_pro"), wording.task("mmlu_pro")
    examples: dict[str, list[str]] = defaultdict(list)
    if shots:
        source = locate(folder, "mmlu_pro_examples")
        for record in read_records(source):
            solution = field(record, "cot_content", source).removeprefix("A: ")
            shown = text.text(
                "example",
                question=record["question"],
                options=_options(record["options"], text),
                solution=solution,
            )
            examples[record["category"]].append(shown)
    for record in read_records(path):
        shown = examples[record["category"]]
        draft = _mmlu_pro_draft(record, path, text, shown[:shots])
        for count in range(shots - 1, -1, -1):
            if encoder.length(draft) + MAX_TOKENS <= max_length:
                break
            draft = _mmlu_pro_draft(record, path, text, shown[:count])
        yield encoder.freeze(draft, "mmlu_pro", boundary)


def _mmlu_pro_draft(
    record: dict[str, Any], path: Path, text: Template, examples: list[str]
) -> Draft:
    options = field(record, "options", path)
    question = field(record, "question", path)
    category, letter = field(record, "category", path), field(record, "answer", path)
    return Draft(
        id=str(field(record, "question_id", path)),
        context=text.text("instruction", category=category) + "".join(examples),
        question=text.text("question", question=question, options=_options(options, text)),
        answer_prefix=text.raw("prefix"),
        references=(letter,),
        scorer="mmlu_pro",
        max_tokens=MAX_TOKENS,
        answer=f" The answer is ({letter}).",
        tags={"category": category, "options": len(options)},
    )


def _options(options: list[str], text: Template) -> str:
    pairs = zip(LETTERS, options, strict=False)
    return "\n".join(text.text("option", letter=letter, text=option) for letter, option in pairs)


def gpqa(
    folder: Path | None, encoder: Encoder, wording: Wording, boundary: Boundary = "question"
) -> Iterator[Problem]:
    """Options in an order drawn for each item from a fixed seed."""
    path, text = locate(folder, "gpqa"), wording.task("gpqa")
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    for number, record in enumerate(read_records(path)):
        options = [field(record, name, path).strip() for name in names]
        order = np.random.default_rng((SHUFFLE_SEED, number)).permutation(len(options))
        letter = LETTERS[int(np.flatnonzero(order == 0)[0])]
        draft = Draft(
            id=str(number),
            context="",
            question=text.text(
                "question",
                question=field(record, "Question", path).strip(),
                options=_options([options[i] for i in order], text),
            ),
            answer_prefix=text.raw("prefix"),
            references=(letter,),
            scorer="letter",
            max_tokens=MAX_TOKENS,
            answer=f"Answer: {letter}",
            tags={"category": record.get("High-level domain", ""), "options": len(options)},
        )
        yield encoder.freeze(draft, "gpqa", boundary)
