"""Plain counters that the engine updates, and their Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jhybrid.engine.request import RecoveryName

CONTENT_TYPE = CONTENT_TYPE_LATEST

OWNERS = ("free", "tree", "running")
POOLS = ("kv_pages", "native_slots", "compressed_slots", "group_inputs", "host_bytes")
FINISH_REASONS = ("stop", "length", "abort", "error")
PREFIX_KINDS = ("matched", "restored", "replayed")
RECOVERIES = tuple(name for name in get_args(RecoveryName) if name != "off")
DEMOTION_OUTCOMES = ("committed", "aborted")

LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)


@dataclass
class Histogram:
    """Counts per bucket (upper bounds inclusive, the last bucket open) and the sum."""

    bounds: tuple[float, ...] = LATENCY_BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus counts buckets."""
        pairs, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return pairs


def _zeros(labels: tuple[str, ...]) -> Counter[str]:
    # A series that is absent until its first event breaks rate(); start every known one at zero.
    return Counter(dict.fromkeys(labels, 0))


@dataclass
class EngineMetrics:
    """Everything the engine counts. `pools[pool][owner]` are set by the engine after a step."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    compilations: int = 0
    finished: Counter[str] = field(default_factory=lambda: _zeros(FINISH_REASONS))
    prefix_tokens: Counter[str] = field(default_factory=lambda: _zeros(PREFIX_KINDS))
    prefix_hits: Counter[str] = field(default_factory=lambda: _zeros(RECOVERIES))
    evictions: Counter[str] = field(default_factory=lambda: _zeros(POOLS))
    demotions: Counter[str] = field(default_factory=lambda: _zeros(DEMOTION_OUTCOMES))
    pools: dict[str, dict[str, int]] = field(
        default_factory=lambda: {pool: dict.fromkeys(OWNERS, 0) for pool in POOLS}
    )
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    e2e_request_latency: Histogram = field(default_factory=Histogram)
    request_queue_time: Histogram = field(default_factory=Histogram)

    def prometheus_text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_MetricsCollector(self))
        return generate_latest(registry)


@dataclass
class RequestClock:
    """Turns what happens to one request into observations; times are time.monotonic()."""

    metrics: EngineMetrics
    arrival: float
    scheduled_at: float | None = None
    last_token_at: float | None = None

    def on_scheduled(self, now: float) -> None:
        """First admission only: coming back after a preemption is not queueing."""
        if self.scheduled_at is None:
            self.scheduled_at = now
            self.metrics.request_queue_time.observe(now - self.arrival)

    def on_tokens(self, now: float, count: int = 1) -> None:
        if count < 1:
            return
        self.metrics.generation_tokens += count
        if self.last_token_at is None:
            self.metrics.time_to_first_token.observe(now - self.arrival)
        else:
            self.metrics.inter_token_latency.observe((now - self.last_token_at) / count, count)
        self.last_token_at = now

    def on_finish(self, now: float, reason: str) -> None:
        self.metrics.finished[reason] += 1
        self.metrics.e2e_request_latency.observe(now - self.arrival)


class _MetricsCollector(Collector):
    """Presents one EngineMetrics under the names that dashboards rely on."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        requests = GaugeMetricFamily(
            "jhybrid:requests", "Requests in the engine.", labels=["state"]
        )
        requests.add_metric(["running"], m.running)
        requests.add_metric(["waiting"], m.waiting)
        yield requests
        pool = GaugeMetricFamily(
            "jhybrid:pool", "Use of each pool by owner.", labels=["pool", "owner"]
        )
        for name, owners in m.pools.items():
            for owner, amount in owners.items():
                pool.add_metric([name, owner], amount)
        yield pool
        yield _counter("requests_finished", "Requests that ended.", "reason", m.finished)
        yield _counter("prefix_tokens", "Prompt tokens by cache outcome.", "kind", m.prefix_tokens)
        yield _counter("prefix_hits", "Hits by what they got.", "recovery", m.prefix_hits)
        yield _counter("evictions", "Checkpoints, slots or pages evicted.", "pool", m.evictions)
        yield _counter("demotions", "Dense checkpoints demoted.", "outcome", m.demotions)
        yield _plain_counter("prompt_tokens", "Prompt tokens.", m.prompt_tokens)
        yield _plain_counter("generation_tokens", "Generated tokens.", m.generation_tokens)
        yield _plain_counter("preemptions", "Running requests put back.", m.preemptions)
        yield _plain_counter("compilations", "Steps compiled.", m.compilations)
        yield _histogram("time_to_first_token", "Arrival to first token.", m.time_to_first_token)
        yield _histogram("inter_token_latency", "Between tokens.", m.inter_token_latency)
        yield _histogram("e2e_request_latency", "Arrival to end.", m.e2e_request_latency)
        yield _histogram("request_queue_time", "Arrival to admission.", m.request_queue_time)


def _counter(name: str, text: str, label: str, values: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"jhybrid:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _plain_counter(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"jhybrid:{name}", text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(
        f"jhybrid:{name}_seconds", text, buckets=histogram.cumulative(), sum_value=histogram.total
    )
