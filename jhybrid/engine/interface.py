"""What the server and the offline API may ask of an engine, and nothing more."""

from __future__ import annotations

from typing import Any, Protocol

from jhybrid.engine.metrics import EngineMetrics
from jhybrid.engine.request import Request, RequestUpdate


class EngineProtocol(Protocol):
    """A step-driven engine. One thread owns it: no method is called from two threads at once."""

    @property
    def tokenizer(self) -> Any:
        """A transformers fast tokenizer."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens that a prompt and its output may have together."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, or ValueError whose message starts with the field."""
        ...

    def abort(self, request_id: str) -> None:
        """Free what a request holds within one step; unknown ids are ignored."""
        ...

    def step(self) -> list[RequestUpdate]:
        """Run one step; returns at once when there is nothing to do."""
        ...

    def has_work(self) -> bool: ...

    def info(self) -> dict[str, Any]:
        """Facts for /server_info, JSON-serialisable."""
        ...

    def metrics(self) -> EngineMetrics: ...

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests run."""
        ...
