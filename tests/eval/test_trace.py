"""Traces: their shape, that they repeat, how they are sent, and what is measured of the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jhybrid.eval.trace.client import Answer, Target, order_of, send_trace, statistics
from jhybrid.eval.trace.server import capacity, flush
from jhybrid.eval.trace.shape import (
    Conversation,
    Shape,
    Turn,
    check,
    digest,
    from_log,
    generated,
    largest_context,
    plain_ids,
)
from tests.byte_tokenizer import byte_tokenizer
from tests.eval.data_files import wildchat_rows
from tests.serve.conftest import RunningServer
from tests.serve.fake_engine import FakeEngine


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = RunningServer(FakeEngine(max_running=2, step_seconds=0.002))
    yield running
    running.stop()


def test_a_generated_trace_has_the_published_shape():
    trace = generated(Shape(), range(100), seed=0)
    assert len(trace) == 256 and {len(c) for c in trace} == {4}
    first = [len(c[0].prompt) for c in trace]
    assert 1024 <= min(first) and max(first) <= 8192
    turns = [turn for c in trace for turn in c]
    assert max(t.decode for t in turns) <= 1024 and largest_context(trace) <= 16384
    for conversation in trace:
        for before, after in zip(conversation, conversation[1:], strict=False):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) > len(before.prompt) + before.decode  # reply and message
    mean = sum(t.decode for t in turns) / len(turns)
    assert 300 < mean < 500  # log-normal, median 300 and sigma 0.8, clipped


def test_traces_repeat_and_scale():
    shape = Shape(conversations=5, scale=0.01)
    one, same, other = (generated(shape, range(9), seed) for seed in (1, 1, 2))
    assert digest(one) == digest(same) != digest(other)
    assert largest_context(one) <= 164 and min(len(c[0].prompt) for c in one) >= 10
    tight = Shape(conversations=3, turns=6, first=(10, 10), context=30, decode=20)
    for conversation in generated(tight, range(9), 0):
        assert len(conversation) == 6
        assert all(len(t.prompt) + t.decode <= 30 for t in conversation)
    check(one, 200)
    with pytest.raises(ValueError, match="trace"):
        check(one, 50)


def test_a_trace_of_recorded_conversations(tmp_path: Path):
    rows = [*wildchat_rows(3, 1), *wildchat_rows(2, 4)]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = byte_tokenizer()
    shape = Shape(conversations=2, turns=2, first=(10, 2000), context=6000, decode=40)
    trace = from_log(path, shape, tokenizer)
    assert [len(c) for c in trace] == [2, 2]  # the one of three turns has another shape
    text = str(tokenizer.decode(list(trace[0][1].prompt)))
    assert text.count("<|im_start|>user") == 2 and text.endswith("<|im_start|>assistant\n")
    assert "secret" not in text
    assert all(t.decode == 40 for c in trace for t in c)
    with pytest.raises(ValueError, match="found 4"):
        from_log(path, Shape(5, 2, (10, 2000), 6000, 40), tokenizer)


def test_plain_ids_leave_out_added_tokens():
    tokenizer = byte_tokenizer()
    assert plain_ids(tokenizer) == list(range(256))


def conversations(count: int) -> list[Conversation]:
    return [
        tuple(Turn((65 + n,) * (4 * turn + 3), 3 + turn) for turn in range(3)) for n in range(count)
    ]


def test_every_turn_is_sent_after_the_one_before(server: RunningServer):
    trace = conversations(6)
    target = Target(f"{server.url}/v1")
    seen: list[Answer] = []
    answers = asyncio.run(send_trace(target, trace, concurrency=4, seed=3, on_answer=seen.append))
    assert [(a.conversation, a.turn) for a in answers] == [
        (c, t) for c in range(6) for t in range(3)
    ]
    assert sorted(map(str, seen)) == sorted(map(str, answers))
    for answer in answers:
        turn = trace[answer.conversation][answer.turn]
        assert answer.error is None and (answer.prompt, answer.generated) == (
            len(turn.prompt),
            turn.decode,
        )
        assert 0 < answer.ttft <= answer.e2e
    sent = [r.prompt_token_ids for r in server.engine.added]
    for conversation in trace:
        assert [p for p in sent if p[0] == conversation[0].prompt[0]] == [
            t.prompt for t in conversation
        ]
    # the first to be sent are the first of the seeded order
    places = order_of(6, 3)
    first = sorted(range(6), key=lambda c: places[c])[:4]
    assert {p[0] - 65 for p in sent[:4]} == set(first)
    assert {r.params.ignore_eos for r in server.engine.added} == {True}
    seeds = [r.params.seed for r in server.engine.added]
    assert len(set(seeds)) == len(seeds)


def test_failures_are_counted_and_not_timed(server: RunningServer):
    trace: list[Conversation] = [(Turn((65,), 2),), (Turn((65,) * 9000, 2),)]  # one is too long
    answers = asyncio.run(send_trace(Target(f"{server.url}/v1"), trace, concurrency=2, seed=0))
    assert answers[0].error is None
    assert answers[1].error is not None and answers[1].error.startswith("400")
    found = statistics(answers)
    assert found["requests_failed"] == 1 and found["e2e_mean"] == answers[0].e2e
    server.uvicorn.should_exit = True
    server.thread.join(timeout=20)
    gone = asyncio.run(
        send_trace(Target(f"{server.url}/v1", model="m"), trace[:1], concurrency=1, seed=0)
    )
    assert gone[0].error is not None and "Connect" in gone[0].error
    assert statistics(gone) == {"requests_failed": 1.0}


def test_statistics_are_over_all_requests():
    answers = [Answer(0, n, float(n), 2.0 * n, 10, 5 if n else 0, 3) for n in range(21)]
    found = statistics(answers)
    assert (found["ttft_mean"], found["ttft_p50"], found["ttft_p95"]) == (10, 10, 19)
    assert (found["e2e_mean"], found["e2e_p95"]) == (20, 38)
    assert found["hit"] == pytest.approx(100 / 210)


def test_what_a_server_cannot_say_is_none(server: RunningServer):
    assert flush(server.url)
    assert capacity(f"{server.url}/nowhere") is None
