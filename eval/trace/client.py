"""A closed-loop client of any OpenAI server: sends a trace, and times every answer.

A conversation's next turn is sent when the turn before has ended. Of all turns that could be sent
the earliest of the seeded order goes first, so arrival is round-robin over shuffled conversations.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np

from .server import bearer
from .shape import Conversation, Turn

TIMEOUT = httpx.Timeout(600.0, connect=30.0)


@dataclass(frozen=True)
class Answer:
    """Seconds from sending to the first token and to the end; nan with an `error`."""

    conversation: int
    turn: int
    ttft: float
    e2e: float
    prompt: int
    cached: int
    generated: int
    error: str | None = None


@dataclass(frozen=True)
class Target:
    """`base_url` ends in /v1. `model` None asks the server for the one it has."""

    base_url: str
    model: str | None = None
    api_key: str | None = None

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=bearer(self.api_key), limits=limits, timeout=TIMEOUT)


def order_of(conversations: int, seed: int) -> list[int]:
    """The place of each conversation in a seeded shuffle."""
    places = np.empty(conversations, np.int64)
    places[np.random.default_rng(seed).permutation(conversations)] = np.arange(conversations)
    return places.tolist()


async def send_trace(
    target: Target,
    trace: Sequence[Conversation],
    *,
    concurrency: int,
    seed: int,
    temperature: float = 0.0,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """All answers, in the order of conversations and turns; at most `concurrency` at once."""
    answers: dict[tuple[int, int], Answer] = {}
    places = order_of(len(trace), seed)
    ready = [(0, place, number) for number, place in enumerate(places)]
    heapq.heapify(ready)
    running: set[asyncio.Task[Answer]] = set()
    async with target.client() as client:
        model = target.model or await served_model(client, target)
        while ready or running:
            while ready and len(running) < concurrency:
                turn, _, number = heapq.heappop(ready)
                body = _body(trace[number][turn], model, temperature, seed, number, turn)
                running.add(asyncio.create_task(_ask(client, target, body, number, turn)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = task.result()
                answers[answer.conversation, answer.turn] = answer
                if on_answer is not None:
                    on_answer(answer)
                following = answer.turn + 1
                if following < len(trace[answer.conversation]):
                    place = places[answer.conversation]
                    heapq.heappush(ready, (following, place, answer.conversation))
    return [answers[key] for key in sorted(answers)]


async def served_model(client: httpx.AsyncClient, target: Target) -> str:
    reply = await client.get(f"{target.base_url}/models")
    reply.raise_for_status()
    return reply.json()["data"][0]["id"]


def _body(
    turn: Turn, model: str, temperature: float, seed: int, conversation: int, number: int
) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(turn.prompt),
        "max_tokens": turn.decode,
        "ignore_eos": True,  # vLLM and sglang know it too: every server generates as much
        "temperature": temperature,
        "seed": (seed * 1_000_003 + conversation * 64 + number) % 2**31,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(
    client: httpx.AsyncClient, target: Target, body: dict[str, Any], conversation: int, turn: int
) -> Answer:
    start, first, usage = time.perf_counter(), None, {}
    nan = float("nan")
    try:
        async with client.stream("POST", f"{target.base_url}/completions", json=body) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode(errors="replace")
                error = f"{reply.status_code}: {text[:200]}"
                return Answer(conversation, turn, nan, nan, len(body["prompt"]), 0, 0, error)
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices") and first is None:
                    first = time.perf_counter()
                usage = event.get("usage") or usage
    except httpx.HTTPError as error:
        text = f"{type(error).__name__}: {error}"
        return Answer(conversation, turn, nan, nan, len(body["prompt"]), 0, 0, text)
    end = time.perf_counter()
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        conversation,
        turn,
        ttft=(first if first is not None else end) - start,
        e2e=end - start,
        prompt=usage.get("prompt_tokens", len(body["prompt"])),
        cached=details.get("cached_tokens") or 0,
        generated=usage.get("completion_tokens", 0),
    )


def statistics(answers: Sequence[Answer]) -> dict[str, float]:
    """Over all requests of one seed, hits and misses alike; failed ones are counted, not timed."""
    good = [a for a in answers if a.error is None]
    out: dict[str, float] = {"requests_failed": float(len(answers) - len(good))}
    if not good:
        return out
    for name in ("ttft", "e2e"):
        values = [getattr(a, name) for a in good]
        out[f"{name}_mean"] = float(np.mean(values))
        out[f"{name}_p50"] = float(np.percentile(values, 50))
        out[f"{name}_p95"] = float(np.percentile(values, 95))
    out["hit"] = sum(a.cached for a in good) / max(sum(a.prompt for a in good), 1)
    out["generated"] = float(sum(a.generated for a in good))
    return out


def as_records(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [asdict(answer) for answer in answers]
