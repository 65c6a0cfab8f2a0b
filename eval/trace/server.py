"""A server of this project as a child process, for as long as an arm is measured."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

_READY = re.compile(r"jhybrid is ready on (http://\S+)")


@contextmanager
def serving(model: str, flags: dict[str, Any], log: Path) -> Iterator[str]:
    """The base URL (without /v1) of a `jhybrid.serve` with these flags, once it is ready."""
    command = [sys.executable, "-m", "jhybrid.serve", model, "--port", "0"]
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            match = _READY.match(child.stdout.readline())
            if match is None:
                child.wait()
                raise ValueError(f"{' '.join(command)} did not start:\n{log.read_text()[-2000:]}")
            yield match[1]
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()


def bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def flush(url: str, api_key: str | None = None) -> bool:
    """Empty the prefix cache; False where the server has no such route, or refuses."""
    for path in ("/flush_cache", "/reset_prefix_cache"):  # ours and sglang's, vLLM's
        try:
            if httpx.post(url + path, headers=bearer(api_key), timeout=60).status_code == 200:
                return True
        except httpx.HTTPError:
            continue
    return False


def capacity(url: str, api_key: str | None = None) -> int | None:
    """Slots for checkpoints and running states, over all pools; None where a server can't say."""
    try:
        reply = httpx.get(f"{url}/server_info", headers=bearer(api_key), timeout=60)
        pools = reply.json()["pools"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return sum(pool["total"] for name, pool in pools.items() if name.endswith("_slots"))
