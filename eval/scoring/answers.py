"""Are two mathematical answers equal? Integers exactly, then what math-verify can decide.

math-verify is the optional extra `eval`; without it closed forms are compared as normalised text
only, and `grader()` says which of the two it was.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections import Counter

from .boxed import final_answer

_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|,|;|:|!|quad|qquad)(?![A-Za-z])"
    r"|\\ |\$|\^\s*\{?\\circ\}?|°|\\degree"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|operatorname|mathbf)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = {"sin", "cos", "tan", "log", "exp", "max", "min", "gcd", "lcm", "mod", "sqrt", "infty"}


def grader() -> str:
    return "math-verify" if importlib.util.find_spec("math_verify") else "text"


def normalize_answer(text: str, *, is_list: bool = False) -> str:
    """Layout commands, units of typesetting and decoration dropped; brackets become round."""
    text = text.replace("{,}", ",")
    text = _DROPPED.sub("", text)
    text = _TEXT.sub(lambda m: f" {m[1].strip()} ", text)
    text = _FRACTION.sub(r"(\1)/(\2)", text)
    text = text.split("\\approx")[0].split("=")[-1]
    if is_list:
        text = re.sub(r"\b(?:and|or)\b", ",", text)
    else:
        text = _THOUSANDS.sub("", text)
    for old, new in (("\\{", "("), ("\\}", ")"), ("[", "("), ("]", ")")):
        text = text.replace(old, new)
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def needs_judge(gold: str) -> bool:
    """The answer is said in words ("all powers of 2"), which no symbolic check can decide."""
    plain = _TEXT.sub(lambda m: f" {m[1]} ", gold)
    plain = re.sub(r"\\[A-Za-z]+", " ", plain)
    return any(word.lower() not in _FUNCTIONS for word in _WORDS.findall(plain))


def answers_equal(predicted: str, gold: str) -> bool:
    """Lists (top-level commas in the gold answer) compare as multisets."""
    parts = _parts(normalize_answer(gold, is_list=True))
    if len(parts) > 1:
        found = _parts(normalize_answer(predicted, is_list=True))
        return len(found) == len(parts) and _matched(found, parts)
    return _single(normalize_answer(predicted), normalize_answer(gold), predicted, gold)


def math_correct(prediction: str, gold: str) -> bool:
    """Whether the final answer of a whole solution is the gold one."""
    answer = final_answer(prediction, is_list=len(_parts(normalize_answer(gold))) > 1)
    return answer is not None and answers_equal(answer, gold)


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets; a bracketed list of a whole answer is opened first."""
    if text.startswith("(") and text.endswith(")") and _depth_is_zero_only_at_end(text):
        return [text]  # a tuple or an interval is one thing
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "({") - (char in ")}")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _depth_is_zero_only_at_end(text: str) -> bool:
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i == len(text) - 1
    return False


def _matched(found: list[str], wanted: list[str]) -> bool:
    if Counter(found) == Counter(wanted):
        return True
    left = list(wanted)
    for part in found:
        hit = next((w for w in left if _single(part, w, part, w)), None)
        if hit is None:
            return False
        left.remove(hit)
    return True


def _single(predicted: str, gold: str, raw_predicted: str, raw_gold: str) -> bool:
    if re.fullmatch(r"[+-]?\d+", predicted) and re.fullmatch(r"[+-]?\d+", gold):
        return int(predicted) == int(gold)
    if predicted.replace(" ", "") == gold.replace(" ", ""):
        return True
    numbers = (_number(predicted), _number(gold))
    if None not in numbers:
        a, b = numbers
        assert a is not None and b is not None
        return abs(a - b) <= 1e-10 * max(1.0, abs(b))
    return not needs_judge(raw_gold) and _verified(raw_predicted, raw_gold)


def _number(text: str) -> float | None:
    """A decimal, or a quotient of two."""
    match = re.fullmatch(r"\(?([+-]?\d+(?:\.\d+)?)\)?(?:/\(?(\d+(?:\.\d+)?)\)?)?", text)
    if match is None or (match[2] is not None and float(match[2]) == 0):
        return None
    return float(match[1]) / float(match[2] or 1)


def _verified(predicted: str, gold: str) -> bool:
    if grader() == "text":
        return False
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def parsed(text: str) -> list[object]:
        text = text if "$" in text or "\\boxed" in text else f"${text}$"
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    return bool(verify(parsed(gold), parsed(predicted), timeout_seconds=None))  # pyright: ignore[reportArgumentType]
