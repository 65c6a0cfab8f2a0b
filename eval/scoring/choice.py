"""The letter that an answer to a multiple-choice question settles on."""

from __future__ import annotations

import re

_MMLU_PRO = (
    re.compile(r"answer is \(?([A-J])\)?"),
    re.compile(r".*[aA]nswer:\s*([A-J])"),
    re.compile(r"\b([A-J])\b(?!.*\b[A-J]\b)", re.DOTALL),
)
_EXPLICIT = re.compile(r"(?:answer\s*(?:is|:)\s*|\\boxed\{\s*)\**\(?([A-Z])\)?(?![A-Za-z])", re.I)
_PARENTHESISED = re.compile(r"\(([A-Z])\)")


def mmlu_pro_letter(text: str) -> str | None:
    """MMLU-Pro's three patterns, in their order; None where the original would guess."""
    for pattern in _MMLU_PRO:
        found = pattern.search(text)
        if found:
            return found[1]
    return None


def last_letter(text: str, options: int) -> str | None:
    """The last explicit answer, else the last (X), else the last letter that stands alone."""
    letters = "ABCDEFGHIJ"[:options]
    patterns = (_EXPLICIT, _PARENTHESISED, re.compile(rf"\b([{letters}])\b"))
    for pattern in patterns:
        found = [m.upper() for m in pattern.findall(text) if m.upper() in letters]
        if found:
            return found[-1]
    return None
