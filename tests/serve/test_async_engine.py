"""The engine thread: adding while it is busy, giving up, failing, closing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from jhybrid.engine.request import Request, SamplingParams
from jhybrid.serve.async_engine import AsyncEngine, EngineUnavailable
from tests.serve.fake_engine import FakeEngine


def request(name: str, max_tokens: int = 5) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens))


def run(engine: FakeEngine, body: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        wrapped = AsyncEngine(engine)
        try:
            await body(wrapped)
        finally:
            await wrapped.close()

    asyncio.run(main())


def test_updates_of_several_requests_come_in_one_stream():
    async def body(engine: AsyncEngine) -> None:
        generation = await engine.submit([request("a", 3), request("b", 5)])
        updates = [update async for update in generation]
        for name, count in (("a", 3), ("b", 5)):
            own = [update for update in updates if update.request_id == name]
            assert len(own) == count and own[-1].finish_reason == "length"
        generation.close()

    engine = FakeEngine()
    run(engine, body)
    assert engine.aborted == []


@pytest.mark.parametrize("wait", [0.0, 0.02, 0.06])
def test_giving_up_while_being_added(wait: float):
    """The engine is inside a slow step; whether it sees the request or not, nothing stays."""

    async def body(engine: AsyncEngine) -> None:
        first = await engine.submit([request("first", 1000)])
        adding = asyncio.ensure_future(engine.submit([request("second", 1000)]))
        await asyncio.sleep(wait)
        if adding.done():
            adding.result().close()
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        first.close()
        await engine.call(lambda e: None)

    engine = FakeEngine(step_seconds=0.05)
    run(engine, body)
    assert not engine.has_work()


def test_refusal_reaches_the_caller_and_nothing_stays():
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(KeyError):
            await engine.submit([request("a"), request("b")])
        await engine.call(lambda e: None)

    def reply(prompt: str, request: Request) -> str:
        if request.request_id == "b":
            raise KeyError
        return "x"

    engine = FakeEngine(reply=reply)
    run(engine, body)
    assert engine.aborted == ["a"] and not engine.has_work()


def test_failure_answers_calls_that_wait():
    async def body(engine: AsyncEngine) -> None:
        generation = await engine.submit([request("a", 1000)])
        fake.fail_with = MemoryError()
        calls = [engine.call(lambda e: e.info()) for _ in range(20)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, dict | EngineUnavailable) for r in results)
        with pytest.raises(EngineUnavailable, match="MemoryError"):
            async for _ in generation:
                pass
        assert engine.failure is not None
        with pytest.raises(EngineUnavailable):
            await engine.submit([request("b")])
        generation.close()

    fake = FakeEngine(step_seconds=0.01)
    run(fake, body)


def test_close_lets_running_requests_finish():
    async def body(engine: AsyncEngine) -> None:
        generation = await engine.submit([request("a", 50)])
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await engine.submit([request("late")])
        assert len([update async for update in generation]) == 50
        await closing
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await engine.call(lambda e: e.info())

    started = time.monotonic()
    run(FakeEngine(step_seconds=0.002), body)
    assert time.monotonic() - started < 5
