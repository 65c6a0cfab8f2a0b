"""The command as a process: says where it listens, drains on SIGTERM, ends with status 0."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from jhybrid.serve.__main__ import bind, main, parse_args

ROOT = Path(__file__).parents[2]
PROGRAM = """
from jhybrid.serve import __main__ as command
from tests.serve.fake_engine import FakeEngine
command.build_engine = lambda args: FakeEngine(step_seconds=0.01)
command.main()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", PROGRAM, "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        yield child
        child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drains_and_exits_cleanly(process: subprocess.Popen[str], number: int):
    assert process.stdout is not None
    ready = re.fullmatch(r"jhybrid is ready on (http://127.0.0.1:\d+)\n", process.stdout.readline())
    assert ready
    with openai.OpenAI(base_url=f"{ready[1]}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="p", max_tokens=60, stream=True)
        texts = [next(iter(stream)).choices[0].text]
        os.kill(process.pid, number)
        texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == "abcdefghij" * 6
    assert process.wait(timeout=10) == 0


def test_port_in_use_is_said_before_loading():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit, match="cannot listen on 127.0.0.1"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_what_the_engine_refuses_is_said_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    def refuse(args: object) -> None:
        raise ValueError("max_context must be at most the model's 512, got 1024")

    monkeypatch.setattr("jhybrid.serve.__main__.build_engine", refuse)
    with pytest.raises(SystemExit, match="error: max_context must be"):
        main(["--port", "0"])


def test_flags():
    args = parse_args(["demo", "--host", "::1", "--api-key", "k", "--served-model-name", "m"])
    assert (args.host, args.port, args.api_key, args.served_model_name) == ("::1", 8000, "k", "m")
