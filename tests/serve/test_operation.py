"""Clients that leave, queues that fill, keys, failures, shutdown: the server stays in order."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import RunningServer, Start, wait_until
from tests.serve.fake_engine import FakeEngine

LONG = {"model": "fake", "prompt": "p", "max_tokens": 4000}


def idle(server: RunningServer) -> bool:
    return not server.engine.running and not server.engine.waiting


def open_request(server: RunningServer, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("queued", [True, False])
def test_client_that_leaves_frees_everything(start: Start, stream, queued):
    server = start(FakeEngine(step_seconds=0.002))
    if queued:
        server.engine.gate.clear()  # nothing is admitted: they leave while waiting
    body = b'{"prompt": ["a", "b"], "max_tokens": 4000, "stream": %s}' % stream.encode()
    clients = [open_request(server, body) for _ in range(10)]
    wait_until(lambda: len(server.engine.added) == 20)
    for client in clients:
        client.close()
    wait_until(lambda: idle(server), seconds=2)
    assert len(server.engine.aborted) == 20
    server.engine.gate.set()
    assert server.openai.completions.create(model="fake", prompt="p").choices[0].text


def test_stream_closed_midway(start: Start):
    server = start(FakeEngine(step_seconds=0.002))
    with server.openai.completions.create(**LONG, stream=True) as stream:
        assert next(iter(stream)).choices[0].text == "a"
        (request_id,) = server.engine.running
    wait_until(lambda: idle(server), seconds=2)
    assert server.engine.aborted == [request_id]


def test_only_the_engine_thread_touches_the_engine(start: Start):
    server = start()
    server.openai.completions.create(model="fake", prompt="p")
    assert server.engine.threads == {"jhybrid-engine"}


def test_idle_engine_is_not_stepped(start: Start):
    server = start()
    server.openai.completions.create(model="fake", prompt="p", max_tokens=3)
    steps = server.engine.steps
    assert steps == 3
    server.http.get("/server_info")
    assert server.engine.steps == steps


def test_full_queue(start: Start):
    server = start(FakeEngine(max_queue=2))
    server.engine.gate.clear()
    clients = [open_request(server, b'{"prompt": "a"}') for _ in range(2)]
    wait_until(lambda: len(server.engine.waiting) == 2)
    for stream in (True, False):
        reply = server.http.post("/v1/completions", json={"prompt": "b", "stream": stream})
        assert reply.status_code == 429 and reply.headers["Retry-After"] == "3"
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    with pytest.raises(openai.RateLimitError):
        server.openai.completions.create(model="fake", prompt="b")
    for client in clients:
        client.close()
    wait_until(lambda: idle(server))


def test_all_choices_of_a_request_are_queued_or_none(start: Start):
    server = start(FakeEngine(max_queue=2))
    server.engine.gate.clear()
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}),
    ):
        wait_until(lambda: not idle(server))
        reply = server.http.post("/v1/completions", json={"prompt": "a", "n": 2})
        assert reply.status_code == 429
        assert len(server.engine.aborted) == 1  # the one of the two that was in
    wait_until(lambda: idle(server))


def test_more_choices_than_the_queue_can_ever_take(start: Start):
    server = start(FakeEngine(max_queue=2))
    server.engine.gate.clear()
    reply = server.http.post("/v1/completions", json={"prompt": "a", "n": 3})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"
    assert idle(server) and len(server.engine.aborted) == 2


def test_api_key(start: Start):
    server = start(api_key="s3cret-ключ")
    paths = [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/flush_cache")]
    paths += [("GET", "/server_info"), ("GET", "/nothing")]
    for wrong in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "s3cret"}):
        for method, path in paths:
            reply = server.http.request(method, path, headers=wrong)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["WWW-Authenticate"] == "Bearer"
    right = {b"Authorization": "Bearer s3cret-ключ".encode()}
    assert server.http.get("/v1/models", headers=right).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/metrics").status_code == 200


def test_served_model_name(start: Start):
    server = start(served_model_name="team/model")
    assert [model.id for model in server.openai.models.list()] == ["team/model"]
    card = server.openai.models.retrieve("team/model")
    assert card.model_dump()["max_model_len"] == 8192
    assert server.openai.completions.create(model="team/model", prompt="p").model == "team/model"
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="fake", prompt="p")


def test_information_and_flush(start: Start):
    server = start()
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/server_info").json()["max_context"] == 8192
    assert server.http.post("/flush_cache").json() == {"flushed": True}
    server.engine.gate.clear()
    client = open_request(server, b'{"prompt": "a"}')
    wait_until(lambda: not idle(server))
    assert server.http.post("/flush_cache").status_code == 409
    server.engine.gate.set()
    wait_until(lambda: idle(server))
    client.close()


def test_metrics_after_requests(start: Start):
    server = start()
    for _ in range(3):
        server.openai.completions.create(model="fake", prompt="four", max_tokens=5)
    reply = server.http.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert values["jhybrid:requests_finished_total", "length"] == 3
    assert values["jhybrid:prompt_tokens_total",] == 12
    assert values["jhybrid:generation_tokens_total",] == 15
    assert values["jhybrid:time_to_first_token_seconds_count",] == 3
    assert values["jhybrid:inter_token_latency_seconds_count",] == 12
    assert values["jhybrid:requests", "running"] == 0


def test_engine_failure_reaches_everyone(start: Start):
    server = start(FakeEngine(step_seconds=0.002))
    with ThreadPoolExecutor() as pool:
        stream = iter(server.openai.completions.create(**LONG, stream=True))
        next(stream)
        waiting = [pool.submit(server.openai.completions.create, **LONG) for _ in range(4)]
        wait_until(lambda: len(server.engine.running) == 5)
        server.engine.fail_with = RuntimeError("secret detail")
        with pytest.raises(openai.APIError, match="engine has failed"):
            list(stream)
        for future in waiting:
            with pytest.raises(openai.InternalServerError) as caught:
                future.result()
            assert caught.value.status_code == 503
            assert "secret" not in str(caught.value)
    for path in ("/health", "/metrics", "/server_info"):
        reply = server.http.get(path)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_unavailable"
    assert server.http.post("/v1/completions", json={"prompt": "p"}).status_code == 503
    assert server.http.get("/v1/models").status_code == 200


def test_unexpected_error_says_nothing(start: Start):
    server = start()

    def broken(prompt, request):
        raise KeyError("secret detail")

    server.engine.reply = broken
    for stream in (True, False):
        reply = server.http.post("/v1/completions", json={"prompt": "p", "stream": stream})
        assert reply.status_code == 500 and "secret" not in reply.text
        assert reply.json()["error"]["code"] == "internal_error"
    assert server.http.get("/health").status_code == 200


def test_drain_finishes_what_runs_and_accepts_nothing_new():
    server = RunningServer(FakeEngine(step_seconds=0.005))
    with ThreadPoolExecutor() as pool:
        fields = {**LONG, "max_tokens": 100}
        whole = pool.submit(server.openai.completions.create, **fields)
        stream = iter(server.openai.completions.create(**fields, stream=True))
        first = next(stream).choices[0].text
        wait_until(lambda: len(server.engine.running) == 2)
        server.uvicorn.should_exit = True
        wait_until(lambda: not server.uvicorn.servers[0].sockets)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert len(whole.result().choices[0].text) == 100
        assert first + "".join(chunk.choices[0].text for chunk in stream) == ("abcdefghij" * 10)
    server.stop()
    assert not any(thread.name == "jhybrid-engine" for thread in threading.enumerate())


def test_many_streams_with_random_aborts(start: Start):
    server = start(FakeEngine(max_running=16, max_queue=64))

    def one(i: int) -> bool:
        fields = {"model": "fake", "prompt": f"{i}", "max_tokens": 40}
        with server.openai.completions.create(**fields, stream=True) as stream:
            texts = []
            for chunk in stream:
                texts.append(chunk.choices[0].text)
                if i % 3 == 0 and len(texts) == i % 7 + 1:
                    return True
        return "".join(texts) == "abcdefghij" * 4

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, range(200)))
    wait_until(lambda: idle(server), seconds=2)
