"""The bundled model behind the real command, as its users meet it: a process and two clients."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

ROOT = Path(__file__).parents[2]
START_SECONDS = 400  # compiling on a slow, busy machine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a demo server of its own; it must end well when told to."""
    command = [sys.executable, "-m", "jhybrid.serve", "--port", "0", "--max-running", "8"]
    command += ["--max-prefill-tokens", "64", "--max-context", "4096"]
    command += ["--group-inputs", "all", "--host-memory", "64MiB"]
    command += ["--compilation-cache", str(ROOT / "build" / "xla")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    assert process.stdout is not None
    ready = re.search(r"http://\S+", process.stdout.readline())
    watchdog.cancel()
    assert ready is not None, f"the server ended with {process.wait()} before it was ready"
    yield ready[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    process.stdout.close()


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300) as client:
        yield client


def ask(
    client: OpenAI, messages: list, max_tokens: int = 40, cache: dict[str, Any] | None = None
) -> Any:
    return client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"prefix_cache": cache} if cache else None,
    )


def test_recalls_a_number_from_a_long_message(client: OpenAI) -> None:
    filler = "The old house stood at the end of the road, and nobody had lived in it for years. "
    text = filler * 9 + "The number of the red fox is 48213. " + filler * 9
    prompt = f"{text}\nWhat is the number of the red fox?"
    answer = ask(client, [{"role": "user", "content": prompt}])
    assert "48213" in answer.choices[0].message.content


def test_ten_turns_prefill_only_what_is_new(client: OpenAI) -> None:
    messages, known = [], 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"This is turn {turn}. Tell me something."})
        answer = ask(client, messages)
        usage = answer.usage
        prefilled = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        if turn:
            assert usage.prompt_tokens_details.cached_tokens > 0
            assert prefilled <= usage.prompt_tokens - known + 16
        known = usage.prompt_tokens + usage.completion_tokens - 1
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_tail_replay_reuses_all_that_matches_in_turns_and_branches(
    url: str, client: OpenAI
) -> None:
    """Dense goes back to the last checkpoint where a branch is new; tail-replay does not."""
    assert httpx.post(f"{url}/flush_cache").status_code == 200
    cache = {"recovery": "tail-replay", "replay_ratio": 0.25}
    messages, known = [], 0
    for turn in range(6):
        messages.append({"role": "user", "content": f"This is turn {turn}. Tell me something."})
        answer = ask(client, messages, cache=cache)
        usage, used = answer.usage, answer.usage.prefix_cache
        assert usage.prompt_tokens_details.cached_tokens == used["matched_tokens"]
        if turn:
            assert (used["recovery"], used["reason"]) == ("tail-replay", None)
            assert used["matched_tokens"] >= known
            assert used["replayed_tokens"] == -(-used["matched_tokens"] // 4)
        known = usage.prompt_tokens + usage.completion_tokens - 1
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    trunk = "The old house stood at the end of the road, and nobody had lived in it for years. " * 5
    client.completions.create(model="demo", prompt=trunk, max_tokens=1, temperature=0)
    for cut in (33, 200, 301, 377):
        for recovery in ("dense", "tail-replay"):
            usage: Any = client.completions.create(
                model="demo",
                prompt=f"{trunk[:cut]}{'#@'[recovery == 'dense']} and then",
                max_tokens=2,
                extra_body={"prefix_cache": {**cache, "recovery": recovery}},
            ).usage
            reused, used = usage.prompt_tokens_details.cached_tokens, usage.prefix_cache
            assert used["matched_tokens"] == cut
            if recovery == "tail-replay":
                assert reused == cut
            else:
                assert reused == used["restored_tokens"] < cut and used["reason"]


def test_a_replayed_state_still_knows_what_was_said(client: OpenAI) -> None:
    """Another question about the same text: its states come out of a replay."""
    filler = "The old house stood at the end of the road, and nobody had lived in it for years. "
    text = f"{filler * 6}The number of the red fox is 48213. {filler * 2}"
    ask(client, [{"role": "user", "content": f"{text}\nTell me something."}])
    question = [{"role": "user", "content": f"{text}\nWhat is the number of the red fox?"}]
    answer = ask(client, question, cache={"recovery": "tail-replay", "replay_ratio": 0.5})
    used = answer.usage.prefix_cache
    assert used["recovery"] == "tail-replay" and used["matched_tokens"] > len(text)
    assert "48213" in answer.choices[0].message.content


def test_cached_and_uncached_agree(url: str, client: OpenAI) -> None:
    prompt = "Once upon a time there was a boy who lived in a small town by the sea. " * 8

    def once() -> Any:
        return client.completions.create(
            model="demo", prompt=prompt, max_tokens=48, temperature=0, logprobs=5
        )

    assert httpx.post(f"{url}/flush_cache").status_code == 200
    cold, warm = once(), once()
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1
    assert warm.choices[0].text == cold.choices[0].text
    pairs = zip(
        cold.choices[0].logprobs.token_logprobs,
        warm.choices[0].logprobs.token_logprobs,
        strict=True,
    )
    assert all(abs(a - b) < 1e-3 for a, b in pairs)


def test_thirty_two_streams_at_once_keep_apart(client: OpenAI) -> None:
    """Each conversation has its own number and hears no other."""

    def talk(n: int) -> tuple[str, str]:
        number = f"{10000 + 2711 * n}"
        content = f"The number of the blue boat is {number}. What is the number of the blue boat?"
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": content}],
            max_tokens=60,
            temperature=0,
            stream=True,
        )
        return number, "".join(event.choices[0].delta.content or "" for event in stream)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(talk, range(32)))
    wrong = [(number, text) for number, text in answers if number not in text]
    assert len(wrong) <= 1, wrong  # the model is small; bleeding would show in many


def test_two_hundred_requests_with_random_aborts_leave_nothing(url: str, client: OpenAI) -> None:
    rng = random.Random(0)
    shared = "A long road went over the hills to the sea. " * 6
    recoveries = ("dense", "tail-replay", "anchored")

    def request(n: int, cut: int, length: int) -> str | None:
        stream = client.completions.create(
            model="demo",
            prompt=shared[: rng.randrange(1, len(shared))] + f" And number {n} ",
            max_tokens=length,
            temperature=1.0,
            seed=n,
            stream=True,
            extra_body={"prefix_cache": {"recovery": rng.choice(recoveries), "replay_ratio": 0.3}},
        )
        for seen, event in enumerate(stream):
            if seen == cut:
                stream.close()
                return "aborted"
            if event.choices[0].finish_reason:
                return event.choices[0].finish_reason
        return None

    with ThreadPoolExecutor(32) as pool:
        jobs = [
            pool.submit(request, n, rng.randrange(40), rng.randrange(1, 40)) for n in range(200)
        ]
        ends = [job.result() for job in jobs]
    assert set(ends) <= {"stop", "length", "aborted"} and "aborted" in ends
    deadline, pools = time.monotonic() + 10, _pools(url)
    while time.monotonic() < deadline and any(p["running"] for p in pools.values()):
        time.sleep(0.2)
        pools = _pools(url)
    for name, pool in pools.items():
        assert pool["running"] == 0, (name, pool)
        assert pool["free"] + pool["tree"] == pool["total"], (name, pool)
    assert "jhybrid:compilations_total 0.0" in httpx.get(f"{url}/metrics").text


def _pools(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/server_info").json()["pools"]
