"""A server on a free port of 127.0.0.1, in a thread, around a fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import uvicorn

from jhybrid.serve.app import create_app
from tests.serve.fake_engine import FakeEngine


class RunningServer:
    def __init__(self, engine: FakeEngine, **options: str) -> None:
        self.engine = engine
        app = create_app(engine, **options)
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.uvicorn.started)
        self.port: int = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        key = options.get("api_key", "none")
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.engine.gate.set()
        self.uvicorn.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


Start = Callable[..., RunningServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[RunningServer] = []

    def start_server(engine: FakeEngine | None = None, **options: str) -> RunningServer:
        servers.append(RunningServer(engine or FakeEngine(), **options))
        return servers[-1]

    yield start_server
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    """One server for tests that leave nothing behind and set `engine.reply` themselves."""
    server = RunningServer(FakeEngine())
    yield server
    server.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.005)
