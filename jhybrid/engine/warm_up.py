"""Compiling before serving: every function at every bucket that an engine may use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from ..models.cut import closing_layers, lower_layers
from ..models.pages import take_pages
from ..packed import pack
from .buckets import MOVES
from .empty_batches import empty_prefill, empty_replay
from .host_moves import ROW_SIZES, put_name, put_sizes
from .model_runner import ModelRunner, pairs
from .programs import Call, Shape
from .sampler import SampleMode


def warm_up(
    runner: ModelRunner, needed: Callable[[str, Shape], bool] | None = None
) -> Iterator[str]:
    """Compile every function at every bucket (that is `needed`), several at once; yields what
    is done."""
    work = [call for call in warm_up_calls(runner) if needed is None or needed(*call[:2])]
    for name, size in runner.programs.compile_all(work):
        yield f"{name} {'x'.join(map(str, size))}"


def warm_up_calls(runner: ModelRunner) -> Iterator[Call]:
    """Every (function, bucket) with arguments of the right shapes, the slowest first."""
    b, params, caches, rows = runner.buckets, runner.params, runner.caches, runner.rows
    cut, closing = lower_layers(runner.config), closing_layers(runner.config).start
    for tokens, sequences, whole in _prefills(runner):
        batch = pack(empty_prefill(runner, tokens, sequences, whole_prompt=whole))
        size, args = (tokens, sequences, int(whole)), (params, caches, batch)
        yield "prefill-lower", size, args
        yield "prefill-upper", size, (*args, runner.stream_shape(tokens, cut))
        if (sequences, whole) == b.scored_shape(tokens):
            targets = np.zeros(tokens, np.int32)
            scored = (*args, runner.stream_shape(tokens, closing), targets)
            yield "prompt_logprobs", size, scored
    if caches.group_inputs is not None:
        for tokens in b.replay_tokens:
            yield "replay", (tokens,), (params, caches, pack(empty_replay(runner, tokens)))
    for size in b.decode:
        lines = runner.empty_lines(size)
        yield "decode", (size,), (params, caches, runner.hidden_shape(size), runner.drawn, lines)
        yield "set_lines", (size,), (lines, pack(lines))
        pages = pack((np.full((3, size), -1, np.int32), lines.input_pages))
        yield "add_pages", (size,), (lines, pages)
    for size in sorted({*b.prefill_sequences, *b.decode}):
        for mode in SampleMode:
            args = (params, rows, runner.hidden_shape(size), np.full(size, -1, np.int32))
            yield f"draw-{mode.name}", (size,), args
    row = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), rows)
    nowhere, zero = np.full(b.decode[-1], -1, np.int32), np.int32(0)
    yield "copy_pages", (), (caches, pack([(nowhere, nowhere), (nowhere, nowhere)]))
    for kind in runner.host_rows:
        for size in ROW_SIZES[kind]:
            yield f"take-{kind}", (size,), (caches, np.full(size, -1, np.int32))
        for parts, size in put_sizes(kind):
            at = np.full((parts, size), -1, np.int32)
            taken = functools.partial(take_pages, kind=kind)
            rows_of = jax.tree.map(
                lambda row, place: jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=place),
                jax.eval_shape(taken, caches, pages=at[0]),
                runner.placed(kind, "device"),
            )
            yield put_name(kind, parts), at.shape, (caches, [rows_of] * parts, at)
    if runner.compressed is not None:
        moves = (caches, runner.compressed, runner.maps, *pairs([], MOVES))
        for name in ("store_states", "load_states-zero", "load_states-keep"):
            yield name, (), moves
    yield "set_row", (), (rows, pack((zero, row.params)))
    yield "set_seen", (), (rows, zero, row.in_prompt, row.counts)


def warm_up_steps(runner: ModelRunner) -> int:
    return sum(1 for _ in warm_up_calls(runner))


def _prefills(runner: ModelRunner) -> Iterator[tuple[int, int, bool]]:
    """Tokens, sequences, and whether they are one whole prompt."""
    b = runner.buckets
    for tokens in reversed(b.all_prefill_tokens):
        if runner.prefers_whole_prompt(tokens):
            yield tokens, b.prefill_sequences[0], True
        if tokens in b.prefill_tokens:
            yield from ((tokens, sequences, False) for sequences in b.prefill_sequences)
