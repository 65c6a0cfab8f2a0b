"""A plan as the arrays that a step takes: numpy canvases filled sequence by sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels import CONTINUE, Segments

from ..batch import PrefillBatch, ReplayBatch
from ..cache.input_pages import InputPages
from .buckets import bucket
from .decode_lines import DecodeLines
from .empty_batches import empty_prefill, empty_replay
from .ending import ending_tokens
from .model_runner import ModelRunner
from .plan import Piece, Replay
from .request import MAX_LOGIT_BIAS
from .sampler import MAX_BANNED, RowParams, SampleMode
from .sequence import Sequence

MOST = np.iinfo(np.int32).max  # rows are int32; a count beyond it means the same


def prefill_inputs(
    runner: ModelRunner, pieces: list[Piece], inputs: InputPages | None, *, scored: bool
) -> tuple[PrefillBatch, np.ndarray]:
    """The packed batch, and the row that draws at each sequence's end (-1: none). `scored`: some
    piece's prompt is."""
    buckets = runner.buckets
    tokens = buckets.prefill_bucket(sum(p.end - p.start for p in pieces))
    if scored:
        sequences, whole = buckets.scored_shape(tokens)
    else:
        sequences = bucket(buckets.prefill_sequences, len(pieces))
        alone = len(pieces) == 1 and pieces[0].start == 0
        whole = alone and runner.prefers_whole_prompt(tokens)
    batch: Any = empty_prefill(runner, tokens, sequences, whole_prompt=whole)
    rows = np.full(sequences, -1, np.int32)
    at, segment = 0, 0
    cu, load, store = batch.segments
    for n, piece in enumerate(pieces):
        sequence, lease = piece.sequence, piece.sequence.lease
        assert lease is not None
        size = piece.end - piece.start
        positions = np.arange(piece.start, piece.end, dtype=np.int32)
        batch.token_ids[at : at + size] = sequence.prefix(piece.end)[piece.start :]
        batch.positions[at : at + size] = positions
        table = lease.page_table
        slots = _kv_slots(table, positions, runner.page_size)
        written = positions >= lease.write_from
        batch.kv_slots[at : at + size] = np.where(written, slots, -1)
        if inputs is not None:
            slots = _input_slots(inputs, table, positions, runner.page_size)
            batch.input_slots[at : at + size] = np.where(written, slots, -1)
        batch.page_table[n, : len(table)] = table
        batch.cu_seqlens[n + 1 :] = at + size

        # A checkpoint at the very end leaves an empty last segment, which passes the state on.
        ends = [*piece.checkpoints, (piece.end, lease.slot)]
        for i, (depth, slot) in enumerate(ends):
            load[segment] = piece.load_slot if i == 0 else CONTINUE
            store[segment] = slot
            segment += 1
            cu[segment:] = at + depth - piece.start
        if piece.draws:
            rows[n] = sequence.row
        at += size
    return batch.replace(segments=Segments(cu, load, store)), rows


def replay_inputs(
    runner: ModelRunner, replays: list[Replay], inputs: InputPages
) -> Iterator[ReplayBatch]:
    """Batches to run in this order: one that ends within a replay leaves the state to the next."""
    left = deque(replays)
    for size in runner.buckets.replay_calls(sum(r.end - r.start for r in replays)):
        parts, room = list[Replay](), size
        while left and room:
            replay = left.popleft()
            cut = min(replay.end, replay.start + room)
            parts.append(replace(replay, end=cut))
            room -= cut - replay.start
            if cut < replay.end:
                lease = replay.sequence.lease
                assert lease is not None
                left.appendleft(replace(replay, start=cut, load_slot=lease.slot))
        yield _replay_batch(runner, parts, inputs, size)


def _replay_batch(
    runner: ModelRunner, replays: list[Replay], inputs: InputPages, tokens: int
) -> ReplayBatch:
    batch: Any = empty_replay(runner, tokens)
    at = 0
    for n, replay in enumerate(replays):
        sequence, lease = replay.sequence, replay.sequence.lease
        assert lease is not None
        size = replay.end - replay.start
        positions = np.arange(replay.start, replay.end, dtype=np.int32)
        batch.token_ids[at : at + size] = sequence.prefix(replay.end)[replay.start :]
        slots = _input_slots(inputs, lease.page_table, positions, runner.page_size)
        batch.input_slots[at : at + size] = slots
        at += size
        batch.segments.cu[n + 1 :] = at
        batch.segments.load[n], batch.segments.store[n] = replay.load_slot, lease.slot
    return batch


def decode_lines(
    runner: ModelRunner, sequences: list[Sequence], inputs: InputPages | None
) -> DecodeLines:
    """A line for each sequence, in tables as wide as the longest."""
    size, count = bucket(runner.buckets.decode, len(sequences)), len(sequences)
    tables = [s.lease.page_table for s in sequences if s.lease is not None]
    lines: Any = runner.empty_lines(size, max(map(len, tables)))
    lines.rows[:count] = [s.row for s in sequences]
    lines.starts[:count] = [s.prompt_len - 1 for s in sequences]
    lines.state_slots[:count] = [s.lease.slot for s in sequences if s.lease is not None]
    for line, table in zip(lines.page_table, tables, strict=False):
        line[: len(table)] = table
    if inputs is not None:
        at = np.array([s.dispatched for s in sequences]) // runner.page_size
        lines.input_pages[:count] = inputs.of(lines.page_table[np.arange(count), at])
    return lines


def _kv_slots(table: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    return table[positions // page_size] * page_size + positions % page_size


def _input_slots(
    inputs: InputPages, table: np.ndarray, positions: np.ndarray, page_size: int
) -> np.ndarray:
    """Where the group inputs of each position are, -1 where they are not kept."""
    companions = inputs.of(table[positions // page_size])
    return np.where(companions >= 0, companions * page_size + positions % page_size, -1)


def draw_mode(sequences: list[Sequence]) -> SampleMode:
    """The cheapest mode that serves every sequence of the step."""
    if any(_needs_full(s) for s in sequences):
        return SampleMode.FULL
    drawn = any(s.params.temperature > 0 for s in sequences)
    return SampleMode.RANDOM if drawn else SampleMode.GREEDY


def _needs_full(sequence: Sequence) -> bool:
    p = sequence.params
    return bool(
        sequence.has_penalties or p.logit_bias or p.min_tokens > 0 or sequence.wants_logprobs
    )


def row_values(sequence: Sequence, eos: frozenset[int]) -> Any:
    """A sequence's sampling parameters as one row."""
    p = sequence.params
    bias_token = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias_value = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token, value) in enumerate(p.logit_bias.items()):
        bias_token[i], bias_value[i] = token, value
    banned = np.full(MAX_BANNED, -1, np.int32)
    ending = sorted(ending_tokens(sequence, eos)) if p.min_tokens else []
    banned[: len(ending)] = ending
    unsigned = sequence.seed % 2**64
    row: Any = RowParams
    f, i = np.float32, np.int32
    return row(
        last_token=i(sequence.tokens[-1]),
        generated=i(sequence.generated),
        seed=np.array([unsigned >> 32, unsigned & 0xFFFFFFFF], np.uint32),
        temperature=f(p.temperature),
        top_k=i(min(max(p.top_k, 0), MOST)),
        top_p=f(p.top_p),
        min_p=f(p.min_p),
        presence=f(p.presence_penalty),
        frequency=f(p.frequency_penalty),
        repetition=f(p.repetition_penalty),
        bias_token=bias_token,
        bias_value=bias_value,
        banned=banned,
        min_tokens=i(min(p.min_tokens, MOST)),
    )


def at_position(sequence: Sequence) -> RowParams:
    """The row of a sequence that is admitted: for the first time, or again after a preemption."""
    last, generated = np.int32(sequence.tokens[-1]), np.int32(sequence.generated)
    return replace(sequence.row_params, last_token=last, generated=generated)


def seen_tokens(sequence: Sequence, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens the prompt holds, and how often each was generated."""
    in_prompt = np.zeros(vocab, bool)
    in_prompt[list(sequence.request.prompt_token_ids)] = True
    output = np.array(sequence.tokens[sequence.prompt_len :], np.int64)
    return in_prompt, np.bincount(output, minlength=vocab).astype(np.int32)
