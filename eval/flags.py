"""Comma-separated lists as argparse types: an error names the flag, its value, what is expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TypeVar

from jhybrid.engine.arguments import positive

from .arms import Arm, parse_arms

Item = TypeVar("Item")


def listed(item: Callable[[str], Item], expected: str) -> Callable[[str], list[Item]]:
    """A type for `--flag A,B,...`. `item` reads one, or raises ValueError or ArgumentTypeError."""

    def parse(text: str) -> list[Item]:
        try:
            return [item(part.strip()) for part in text.split(",")]
        except (ValueError, argparse.ArgumentTypeError):
            message = f"expected {expected}, separated by commas, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None

    return parse


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A type for names out of `known`."""
    names = tuple(known)
    return listed(lambda name: names[names.index(name)], f"some of {', '.join(names)}")


def arm_list(text: str) -> list[Arm]:
    """A type for names of arms, see arms.py; what is wrong with a name is said."""
    try:
        arms = parse_arms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from None
    if not arms:
        raise argparse.ArgumentTypeError(f"expected names of arms, got {text!r}")
    return arms


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(f"share must be above 0 and up to 1, got {text}")
    return value


def _text(part: str) -> str:
    if not part:
        raise ValueError("text must not be empty")
    return part


counts = listed(positive, "whole numbers of at least 1")
integers = listed(int, "whole numbers")
shares = listed(share, "numbers above 0 and up to 1")
texts = listed(_text, "texts that are not empty")
