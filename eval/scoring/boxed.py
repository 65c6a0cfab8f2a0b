"""The final answer of a solution, as MathArena reads it: the last box, else the last integer."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_INTEGER = re.compile(r"-?\d+")


def final_answer(text: str, *, is_list: bool = False) -> str | None:
    """The content of the last box, inner boxes unwrapped.

    For a list answer all boxes on the last line with a box, joined by commas. None where there is
    neither a box nor an integer.
    """
    boxes = _boxes(text)
    if not boxes:
        integers = _INTEGER.findall(text)
        return integers[-1] if integers else None
    line = text.rfind("\n", 0, boxes[-1][0]) + 1
    if is_list:
        return ",".join(unwrap(content) for start, content in boxes if start >= line)
    return unwrap(boxes[-1][1])


def _boxes(text: str) -> list[tuple[int, str]]:
    """(start, content) of every outermost box whose braces balance."""
    found, at = [], 0
    while match := _BOX.search(text, at):
        end = _closing(text, match.end())
        if end is None:
            at = match.end()
            continue
        found.append((match.start(), text[match.end() : end]))
        at = end
    return found


def _closing(text: str, start: int) -> int | None:
    """Where the brace opened just before `start` is closed."""
    depth = 1
    for i in range(start, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return i
    return None


def unwrap(content: str) -> str:
    """The content of a box within the box, if there is one."""
    inner = _boxes(content)
    return unwrap(inner[-1][1]) if inner else content.strip()
