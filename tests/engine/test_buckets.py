"""Static shapes: what a replay and the prefill of a prompt are cut into."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jhybrid.engine.buckets import PREFILL_CALL, TILE, bucket, make_buckets, table_pages
from pallas_kernels.tiled_matmul.tuning import TiledTuning

BUCKETS = make_buckets(8192, 4, 512, 100)


@pytest.mark.parametrize(
    ("tokens", "calls"),
    [
        (1, (64,)),
        (64, (64,)),
        (206, (256,)),
        (410, (448,)),
        (820, (896,)),
        (1593, (1536, 64)),
        (1700, (1792,)),
        (5000, (1792, 1792, 1536)),
    ],
)
def test_a_replay_is_padded_or_cut_whichever_costs_less(
    tokens: int, calls: tuple[int, ...]
) -> None:
    assert BUCKETS.replay_calls(tokens) == calls


def test_no_replay_is_padded_by_much() -> None:
    for tokens in range(1, 4000):
        calls = BUCKETS.replay_calls(tokens)
        assert sum(calls) >= tokens
        assert sum(calls) - tokens <= max(127, sum(calls) // 5)
        assert len(calls) <= 2 + tokens // 1792


def test_small_engines_have_small_buckets() -> None:
    assert make_buckets(32, 4, 512, 100).replay_calls(70) == (32, 32, 32)


def test_a_long_replay_in_small_pieces_is_only_many_of_them() -> None:
    assert make_buckets(16, 4, 512, 100).replay_calls(262_150) == (16,) * 16385


def test_a_single_sequence_has_steps_of_its_own_where_that_pays() -> None:
    def sizes(max_running: int, single: bool) -> tuple[int, ...]:
        return make_buckets(64, max_running, 512, 100, single=single).decode

    assert sizes(128, single=False) == (2, 8, 32, 128)
    assert sizes(128, single=True) == (1, 2, 8, 32, 128)
    assert (sizes(1, single=False), sizes(1, single=True), sizes(2, single=True)) == (
        (2,),
        (1,),
        (1, 2),
    )


@pytest.mark.parametrize(
    ("waiting", "steps"),
    [
        (1, [1]),
        (256, [256]),
        (257, [256, 1]),
        (700, [700]),  # 1,024 at once, or 256 twice and 188
        (1100, [1024, 76]),
        (3000, [1024, 1024, 952]),
        (3900, [3900]),
        (9000, [8192, 808]),
        (31847, [31847]),
        (40000, [32768, 7232]),
    ],
)
def test_a_prefill_is_cut_where_padding_would_cost_more(waiting: int, steps: list[int]) -> None:
    buckets, taken = make_buckets(32768, 4, 512, 100, longest_alone=32768), []
    while waiting:
        taken.append(buckets.prefill_step([(waiting, not taken)]))
        waiting -= taken[-1]
    assert taken == steps


def test_only_a_prompt_alone_and_from_its_start_takes_a_long_step() -> None:
    buckets = make_buckets(32768, 4, 512, 100, longest_alone=20000)
    assert buckets.long_tokens == (16384, 20000)
    assert buckets.prefill_step([(19000, True), (5000, True)]) == 19000
    assert buckets.prefill_step([(19000, False), (5000, True)]) == 8192
    assert buckets.prefill_step([(4000, True), (19000, True)]) == 4000  # it goes alone, next
    assert buckets.prefill_step([(5000, True), (19000, False)]) == 8192
    assert buckets.prefill_step([(3000, True), (1000, True)]) == 4000
    assert buckets.prefill_step([]) == 0
    with pytest.raises(RuntimeError, match="20001"):
        buckets.prefill_bucket(20001)
    without = make_buckets(32768, 4, 512, 100)
    assert without.long_tokens == () and without.prefill_step([(19000, True)]) == 8192


def test_no_prefill_takes_half_as_long_again_as_its_tokens() -> None:
    buckets = make_buckets(8192, 4, 512, 100)
    for tokens in range(1000, 8193, 13):
        left, cost = tokens, 0
        while left:
            step = buckets.prefill_step([(left, left == tokens)])
            left, cost = left - step, cost + bucket(buckets.prefill_tokens, step) + PREFILL_CALL
        assert cost < 1.5 * (tokens + PREFILL_CALL), tokens


@pytest.mark.parametrize("context", [1, 9000, 20000, 31911, 32768])
@pytest.mark.parametrize("page_size", [8, 16, 48, 256])
def test_a_step_as_long_as_the_context_has_whole_tiles(context: int, page_size: int) -> None:
    room = table_pages(context, page_size) * page_size
    assert context <= room < context + max(3 * TILE, page_size) and room % TILE == 0
    buckets = make_buckets(32768, 4, 512, room // page_size, longest_alone=min(32768, room))
    for tokens in buckets.long_tokens:
        shapes = (tokens, 2560), (1, 2560, 2560)
        avals: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        assert TiledTuning().fits(*avals), tokens
    assert context <= 8192 or buckets.prefill_bucket(context) >= context


def test_a_step_is_full_when_nobody_else_would_run_in_it() -> None:
    buckets = make_buckets(32768, 4, 512, 100, longest_alone=32768)
    assert not buckets.is_full([(5000, True), (3000, True)])
    assert buckets.is_full([(5000, True), (3192, False)])
    assert buckets.is_full([(9000, True)]) and buckets.is_full([(100, True), (9000, True)])
