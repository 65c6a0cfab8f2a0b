"""Gated delta rule: per-head decay (GDN) and per-channel decay (KDA)."""

from .api import decode_gated_delta_rule, ragged_gated_delta_rule
from .dense import dense_gated_delta_rule
from .inputs import Activation, Gates, unpack
from .reference import chunk_gated_delta_rule, recurrent_gated_delta_rule

__all__ = [
    "Activation",
    "Gates",
    "chunk_gated_delta_rule",
    "decode_gated_delta_rule",
    "dense_gated_delta_rule",
    "ragged_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "unpack",
]
