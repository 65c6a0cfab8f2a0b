"""String matches of RULER and the token F1 of SQuAD, LongBench and LoCoMo."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def clean(prediction: str) -> str:
    """RULER's post-processing: control characters become newlines, ends are stripped."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, whatever the case."""
    text = clean(prediction).lower()
    return sum(r.lower() in text for r in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the prediction, whatever the case."""
    text = clean(prediction).lower()
    return float(any(r.lower() in text for r in references))


def normalize(text: str) -> str:
    """Lower case, then no ASCII punctuation, no articles, single spaces, in that order."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """The best F1 over the references of the multisets of normalised words."""
    return max(_f1(normalize(prediction).split(), normalize(r).split()) for r in references)


def _f1(predicted: list[str], gold: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(gold)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)
