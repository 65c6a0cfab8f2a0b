"""Attention over paged keys and values."""

from .api import decode_paged_attention, prefers_whole_prompt, ragged_paged_attention
from .reference import gated, write_pages

__all__ = [
    "decode_paged_attention",
    "gated",
    "prefers_whole_prompt",
    "ragged_paged_attention",
    "write_pages",
]
