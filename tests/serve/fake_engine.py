"""A deterministic engine without a model: `reply` decides every output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from jhybrid.engine.detokenizer import TokenBytes
from jhybrid.engine.metrics import EngineMetrics, RequestClock
from jhybrid.engine.request import PrefixCacheUsage, QueueFull, Request, RequestUpdate, TokenLogprob
from jhybrid.engine.text_stream import TextStream
from tests.byte_tokenizer import byte_tokenizer

Reply = Callable[[str, Request], str | Sequence[int]]


def endless(prompt: str, request: Request) -> str:
    return "abcdefghij" * 500


@dataclass
class Running:
    request: Request
    output: list[int]
    text: TextStream
    clock: RequestClock
    produced: int = 0


@dataclass
class FakeEngine:
    reply: Reply = endless
    max_context: int = 8192
    max_running: int = 8
    max_queue: int = 64
    step_seconds: float = 0.0
    model_name: str = "fake"
    fail_with: BaseException | None = None  # raised by the next step that has work
    tokenizer: Any = field(default_factory=byte_tokenizer)
    added: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: int = 0
    threads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.vocab_size = len(self.tokenizer) + 3  # padded, as models are
        self._vocab = TokenBytes(self.tokenizer)
        self._metrics = EngineMetrics()
        self.running: dict[str, Running] = {}
        self.waiting: list[Running] = []
        self.gate = threading.Event()  # cleared: steps make nothing
        self.gate.set()

    def add(self, request: Request) -> None:
        self.threads.add(threading.current_thread().name)
        if request.prefix_cache.recovery == "dasc-wr":
            raise ValueError("prefix_cache.recovery dasc-wr needs --w-max")
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(len(self.waiting), self.max_queue, retry_after=2.5)
        reply = self.reply(self._vocab.decode(request.prompt_token_ids), request)
        ids = self.tokenizer.encode(reply) if isinstance(reply, str) else list(reply)
        text = TextStream(self._vocab, request.params, request.prompt_token_ids)
        clock = RequestClock(self._metrics, request.arrival_time)
        self.waiting.append(Running(request, ids, text, clock))
        self.added.append(request)

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.current_thread().name)
        known = len(self.running) + len(self.waiting)
        self.running.pop(request_id, None)
        self.waiting = [s for s in self.waiting if s.request.request_id != request_id]
        if len(self.running) + len(self.waiting) < known:
            self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> list[RequestUpdate]:
        self.threads.add(threading.current_thread().name)
        self.steps += 1
        time.sleep(self.step_seconds)
        if not self.gate.is_set():
            time.sleep(0.001)
            return []
        if self.fail_with is not None:
            raise self.fail_with
        admitted = list(islice(self.waiting, self.max_running - len(self.running)))
        self.waiting = self.waiting[len(admitted) :]
        for sequence in admitted:
            sequence.clock.on_scheduled(time.monotonic())
            self._metrics.prompt_tokens += len(sequence.request.prompt_token_ids)
            self.running[sequence.request.request_id] = sequence
        return [self._advance(sequence) for sequence in list(self.running.values())]

    def _advance(self, sequence: Running) -> RequestUpdate:
        request, params = sequence.request, sequence.request.params
        first, done = sequence.produced == 0, sequence.produced >= len(sequence.output)
        eos = self.tokenizer.eos_token_id
        token = eos if done else sequence.output[sequence.produced]
        sequence.produced += 1
        sequence.clock.on_tokens(time.monotonic())
        ended = token == eos or token in params.stop_token_ids
        text, stop = sequence.text.finish() if ended else sequence.text.push(token)
        reason, cause = None, None
        if stop is not None or ended:
            reason, cause = "stop", stop
        elif sequence.produced == params.max_tokens:
            reason = "length"
            tail, cause = sequence.text.finish()
            text += tail
        if reason is not None:
            sequence.clock.on_finish(time.monotonic(), reason)
            del self.running[request.request_id]
        prompt = request.prompt_token_ids
        recovery = request.prefix_cache.recovery or "dense"
        return RequestUpdate(
            request.request_id,
            token_ids=(token,),
            text=text,
            logprobs=() if params.logprobs is None else (_logprob(token, params.logprobs),),
            prompt_logprobs=None
            if params.prompt_logprobs is None or not first
            else (None, *(_logprob(t, params.prompt_logprobs) for t in prompt[1:])),
            prefix_cache=PrefixCacheUsage(
                recovery, len(prompt) // 2, len(prompt) // 4, 0, "no_checkpoint", len(prompt) // 4
            )
            if first
            else None,
            finish_reason=reason,
            stop_reason=cause,
        )

    def info(self) -> dict[str, Any]:
        return {"model": self.model_name, "max_context": self.max_context}

    def metrics(self) -> EngineMetrics:
        self._metrics.running, self._metrics.waiting = len(self.running), len(self.waiting)
        return self._metrics

    def flush_cache(self) -> bool:
        return not self.has_work()


def _logprob(token: int, count: int) -> TokenLogprob:
    """Token t has log-probability -t/1000, and lower ids are the better alternatives."""
    top = tuple((i, -i / 1000) for i in range(count))
    return TokenLogprob(token, -token / 1000, top)
