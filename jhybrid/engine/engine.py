"""The engine: schedule, run, commit, with the host one step ahead of the device.

A step's draws stay on the device, where the next step reads them; the host reads them after it
has sent the next step. So a request that stops on a token has run one token more than it needed:
its state has consumed the stopping token, and its depth says so.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from ..cache.cache_manager import CacheManager
from ..config import require
from .buckets import MAX_REPLAYS
from .check import check_request
from .config import EngineConfig
from .demoter import Demoter
from .detokenizer import TokenBytes
from .dispatch import InFlight, dispatch
from .ending import push_token
from .host_spans import host_span
from .host_tier import HostTier
from .metrics import EngineMetrics, RequestClock
from .model_runner import ModelRunner
from .request import FinishReason, QueueFull, Request, RequestUpdate, TokenLogprob
from .scheduler import Scheduler
from .scores import keep_prompt_scores, token_logprob
from .sequence import Sequence
from .step_inputs import row_values
from .text_stream import TextStream


class Engine:
    """See `jhybrid.engine.interface` for what the methods promise."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheManager,
        tokenizer: Any,
        config: EngineConfig,
        *,
        max_context: int,
        eos: frozenset[int],
        model_name: str,
        transfers: int,
        facts: dict[str, Any],
    ) -> None:
        self.runner, self.cache, self.tokenizer, self.config = runner, cache, tokenizer, config
        self.max_context, self.model_name = max_context, model_name
        self.vocab_size = runner.valid_vocab
        self._eos, self._facts = eos, facts
        self._vocab = TokenBytes(tokenizer)
        self.scheduler = Scheduler(
            cache,
            max_running=config.max_running,
            max_prefill_tokens=config.max_prefill_tokens,
            buckets=runner.buckets,
            caching=config.recovery != "off",
            replay_window=runner.compression.window if runner.compression else 0,
            max_replays=MAX_REPLAYS,
            exact_inputs=config.group_input_dtype == "model",
        )
        self._demoter = Demoter(cache, runner)
        self.host = HostTier(cache, runner, transfers)
        self._sequences: dict[str, Sequence] = {}
        self._aborted: set[str] = set()
        self._in_flight: InFlight | None = None
        self._metrics = EngineMetrics()
        self._seeds = np.random.default_rng(config.seed)
        self._compiled = runner.programs.compilations()

    @host_span("add")
    def add(self, request: Request) -> None:
        name = request.request_id
        require(name not in self._sequences, "request_id", name, "an id that is not in use")
        check_request(
            request,
            self.config,
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            eos=self._eos,
        )
        waiting = len(self.scheduler.waiting)
        if waiting >= self.config.max_queue:
            raise QueueFull(waiting, self.config.max_queue)
        params, prompt = request.params, request.prompt_token_ids
        length = self.max_context - len(prompt)
        if params.max_tokens is not None:
            length = min(length, params.max_tokens)
        ratio = request.prefix_cache.replay_ratio
        sequence = Sequence(
            request,
            TextStream(self._vocab, params, prompt),
            RequestClock(self._metrics, request.arrival_time or time.monotonic()),
            recovery=request.prefix_cache.recovery or self.config.recovery,
            limit=len(prompt) + length,
            seed=params.seed if params.seed is not None else int(self._seeds.integers(2**63)),
            replay_ratio=self.config.replay_ratio if ratio is None else ratio,
        )
        # Made here, though the row is set at admission: what can't be represented is refused now,
        # and does not come up on the engine's thread, where it would end everybody's requests.
        sequence.row_params = row_values(sequence, self._eos)
        self._sequences[request.request_id] = sequence
        self._metrics.prompt_tokens += len(prompt)
        self.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        if request_id in self._sequences:
            self._aborted.add(request_id)

    def has_work(self) -> bool:
        return bool(self._sequences) or self._in_flight is not None or self.cache.demoting > 0

    @host_span("step")
    def step(self) -> list[RequestUpdate]:
        self._demoter.settle()
        updates = self._abort_all()
        self.host.settle()
        alone = not self.scheduler.decoding
        with host_span("schedule"):
            plan = self.scheduler.schedule(kv_arrives=alone)
        self.host.offload()
        previous, self._in_flight = self._in_flight, None
        if plan:
            try:
                self._in_flight = dispatch(plan, self.runner, self.cache, self.host, alone=alone)
            except BaseException:
                self._in_flight = previous
                self._aborted |= self.scheduler.failed(plan)
                raise
            with host_span("tell the tree"):
                self.scheduler.dispatched(plan)
        if previous is not None:
            updates += self._commit(previous)
        self._demoter.start()
        if not plan and previous is None:  # nothing else to do, or nothing can go on before
            self._demoter.settle(wait=True)
        return updates

    def _abort_all(self) -> list[RequestUpdate]:
        updates = []
        for request_id in self._aborted:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                updates.append(self._finish(sequence, "abort"))
        self._aborted.clear()
        return updates

    @host_span("commit")
    def _commit(self, step: InFlight) -> list[RequestUpdate]:
        """Read a finished step: the only place where the host waits for the device."""
        scores = jax.device_get(step.scores)
        for piece, at in step.scored:
            keep_prompt_scores(piece, at, scores)
        updates = []
        now = time.monotonic()
        for sequences, sampled in step.draws:
            with host_span("wait for draws"):
                tokens, logprob, top, top_logprobs = jax.device_get(
                    (sampled.tokens, sampled.logprob, sampled.top_tokens, sampled.top_logprobs)
                )
            for n, sequence in enumerate(sequences):
                if sequence is None or sequence.finished:
                    continue
                sequence.pending -= 1
                found = None
                if sequence.wants_logprobs:
                    wanted = sequence.params.logprobs
                    found = token_logprob(tokens[n], logprob[n], top[n], top_logprobs[n], wanted)
                updates.append(self._append(sequence, int(tokens[n]), found, now))
        return updates

    def _append(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float
    ) -> RequestUpdate:
        """One more token: its text, and whether the request ends with it."""
        sequence.tokens.append(token)
        sequence.clock.on_tokens(now)
        text, reason, stop = push_token(sequence, token, self._eos)
        extra: dict[str, Any] = self._first_report(sequence)
        if reason is not None:
            self._retire(sequence, reason)
        return RequestUpdate(
            sequence.request.request_id,
            token_ids=(token,),
            text=text,
            logprobs=(logprob,) if logprob is not None else (),
            finish_reason=reason,
            stop_reason=stop,
            **extra,
        )

    def _first_report(self, sequence: Sequence) -> dict[str, Any]:
        if sequence.reported:
            return {}
        sequence.reported = True
        usage = sequence.usage
        if usage is not None:
            for kind in ("matched", "restored", "replayed"):
                self._metrics.prefix_tokens[kind] += getattr(usage, f"{kind}_tokens")
            if usage.cached_tokens:
                self._metrics.prefix_hits[usage.recovery] += 1
        asked = sequence.params.prompt_logprobs is not None
        scores = (None, *sequence.prompt_logprobs) if asked else None
        return {"prefix_cache": usage, "prompt_logprobs": scores}

    def _finish(self, sequence: Sequence, reason: FinishReason) -> RequestUpdate:
        extra = self._first_report(sequence)
        self._retire(sequence, reason)
        text, _ = sequence.text.finish()
        return RequestUpdate(sequence.request.request_id, text=text, finish_reason=reason, **extra)

    @host_span("retire")
    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        sequence.clock.on_finish(time.monotonic(), reason)
        del self._sequences[sequence.request.request_id]

    def metrics(self) -> EngineMetrics:
        m, stats = self._metrics, self.cache.stats()
        m.running, m.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        m.preemptions = self.scheduler.preemptions
        m.compilations = self.runner.programs.compilations() - self._compiled
        for pool, count in stats.evictions.items():
            m.evictions[pool] = count
        for outcome, count in stats.demotions.items():
            m.demotions[outcome] = count
        for pool, counts in stats.pools.items():
            m.pools[pool] = {owner: getattr(counts, owner) for owner in m.pools[pool]}
        return m

    def info(self) -> dict[str, Any]:
        pools = self.metrics().pools
        sizes = self.runner.pool_bytes()
        described = {
            pool: {"total": sum(pools[pool].values()), **pools[pool], "bytes": sizes[pool]}
            for pool in sizes
        }
        return {**self._facts, "pools": described}

    def flush_cache(self) -> bool:
        if self._sequences or self._in_flight is not None:
            return False
        while self.cache.demoting:
            self._demoter.start()
            self._demoter.settle(wait=True)
        self.cache.flush()
        return True
