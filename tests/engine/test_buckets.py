"""Static shapes: what a replay is cut into."""

from __future__ import annotations

import pytest

from jhybrid.engine.buckets import make_buckets

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
