"""Kept rows of recurrent states, packed into slots of a compressed pool and back."""

from .api import pack_states, unpack_states
from .reference import Omitted, PackedStates, row_positions

__all__ = [
    "Omitted",
    "PackedStates",
    "pack_states",
    "row_positions",
    "unpack_states",
]
