"""Ops of hybrid linear-attention models: arrays in, arrays out, no knowledge of any engine."""

from .causal_conv1d import decode_causal_conv1d, dense_causal_conv1d, ragged_causal_conv1d
from .gated_delta_rule import (
    Activation,
    Gates,
    chunk_gated_delta_rule,
    decode_gated_delta_rule,
    dense_gated_delta_rule,
    ragged_gated_delta_rule,
    recurrent_gated_delta_rule,
    unpack,
)
from .gated_norm import gated_rms_norm
from .grouped_matmul import grouped_matmul, preferred_alignment
from .paged_attention import (
    decode_paged_attention,
    gated,
    prefers_whole_prompt,
    ragged_paged_attention,
    write_pages,
)
from .ragged import CONTINUE, NO_SLOT, Part, Segments
from .ragged_pack import PackedStates, pack_states, row_positions, unpack_states
from .rotary import rotate, rotate_and_write
from .skinny_matmul import Product, Window, skinny_matmul, skinny_matmuls
from .suffix_replay import suffix_replay
from .tiled_matmul import tiled_matmul

__all__ = [
    "CONTINUE",
    "NO_SLOT",
    "Activation",
    "Gates",
    "PackedStates",
    "Part",
    "Product",
    "Segments",
    "Window",
    "chunk_gated_delta_rule",
    "decode_causal_conv1d",
    "decode_gated_delta_rule",
    "decode_paged_attention",
    "gated",
    "dense_causal_conv1d",
    "dense_gated_delta_rule",
    "gated_rms_norm",
    "grouped_matmul",
    "pack_states",
    "preferred_alignment",
    "prefers_whole_prompt",
    "ragged_causal_conv1d",
    "ragged_gated_delta_rule",
    "ragged_paged_attention",
    "recurrent_gated_delta_rule",
    "suffix_replay",
    "tiled_matmul",
    "unpack",
    "skinny_matmul",
    "skinny_matmuls",
    "rotate",
    "rotate_and_write",
    "row_positions",
    "unpack_states",
    "write_pages",
]
