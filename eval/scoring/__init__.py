"""Scores of one prediction, from 0 to 1, as each benchmark defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jhybrid.config import require

from .answers import math_correct
from .choice import last_letter, mmlu_pro_letter
from .rouge import rouge_l
from .text import clean, string_match_all, string_match_part, token_f1

Tags = Mapping[str, Any]
Scorer = Callable[[str, Sequence[str], Tags], float]

SCORERS: dict[str, Scorer] = {
    "string_match_all": lambda text, references, _: string_match_all(text, references),
    "string_match_part": lambda text, references, _: string_match_part(text, references),
    "starts_with": lambda text, references, _: float(clean(text).startswith(tuple(references))),
    "token_f1": lambda text, references, _: token_f1(text, references),
    "rouge_l": lambda text, references, _: rouge_l(text, references),
    "mmlu_pro": lambda text, references, _: float(mmlu_pro_letter(text) == references[0]),
    "letter": lambda text, references, tags: float(
        last_letter(text, tags["options"]) == references[0]
    ),
    "math": lambda text, references, _: float(math_correct(text, references[0])),
}


def score(name: str, prediction: str, references: Sequence[str], tags: Tags) -> float:
    require(name in SCORERS, "scorer", name, f"one of {', '.join(SCORERS)}")
    return SCORERS[name](prediction, references, tags)
