"""Batches of padding only, in numpy: the canvases that real ones are drawn on."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels import NO_SLOT, Segments

from ..batch import PrefillBatch, ReplayBatch
from .buckets import MAX_REPLAYS
from .model_runner import ModelRunner


def empty_prefill(
    runner: ModelRunner, tokens: int, sequences: int, *, whole_prompt: bool = False
) -> PrefillBatch:
    segments = runner.buckets.segments(tokens, sequences)
    return PrefillBatch(
        token_ids=_host(np.zeros(tokens, np.int32)),
        positions=_host(np.full(tokens, -1, np.int32)),
        kv_slots=_host(np.full(tokens, -1, np.int32)),
        cu_seqlens=_host(np.zeros(sequences + 1, np.int32)),
        page_table=_host(np.full((sequences, runner.buckets.pages), -1, np.int32)),
        segments=Segments(
            _host(np.zeros(segments + 1, np.int32)),
            _host(np.full(segments, NO_SLOT, np.int32)),
            _host(np.full(segments, NO_SLOT, np.int32)),
        ),
        input_slots=_no_input_slots(runner, tokens),
        whole_prompt=whole_prompt,
    )


def empty_replay(runner: ModelRunner, tokens: int) -> ReplayBatch:
    return ReplayBatch(
        token_ids=_host(np.zeros(tokens, np.int32)),
        input_slots=_host(np.full(tokens, -1, np.int32)),
        segments=Segments(
            _host(np.zeros(MAX_REPLAYS + 1, np.int32)),
            _host(np.full(MAX_REPLAYS, NO_SLOT, np.int32)),
            _host(np.full(MAX_REPLAYS, NO_SLOT, np.int32)),
        ),
    )


def _no_input_slots(runner: ModelRunner, size: int) -> Any:
    return None if runner.caches.group_inputs is None else np.full(size, -1, np.int32)


def _host(x: np.ndarray) -> Any:
    """A host array as a batch field: it becomes a device array when a jitted function is called."""
    return x
