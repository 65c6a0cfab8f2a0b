"""Rotary positions: of queries, and of the keys that go to their pages."""

from .api import rotate_and_write
from .reference import rotate

__all__ = ["rotate", "rotate_and_write"]
