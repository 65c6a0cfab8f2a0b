"""A profile in; what the host does, programs and transfers by time out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jhybrid.engine.host_spans import PREFIX, host_span
from jhybrid.eval.ttft_timeline import REQUEST, record, show, summarise


def event(name: str, start: float, duration: float, program: str = "") -> Any:
    stats = [("hlo_module", program)] if program else []
    times = {"start_ns": 1e6 * (5 + start), "duration_ns": 1e6 * duration}
    return SimpleNamespace(name=name, stats=stats, **times)


def line(name: str, *events: Any) -> Any:
    return SimpleNamespace(name=name, events=list(events))


def test_programs_streams_and_kernels_of_a_request() -> None:
    host = [line("python", event(REQUEST, 0, 20), event("other", 1, 1))]
    kernels = line(
        "Stream #1",
        event("scatter.1", 6, 0.5, "jit_put"),
        event("scatter.1", 8, 1, "jit_put"),
        event("gemm_7", 10, 2, "jit_roll"),
        event("gemm_8", 12, 1, "jit_roll"),
        event("scatter", 14, 1, "jit_put"),
    )
    copies = line("Stream #2", event("MemcpyH2D", 2, 4))
    device = [kernels, copies, line("XLA Ops", event("gemm_7", 10, 2))]
    planes = (("/host:CPU", host), ("/device:GPU:0", device))
    found = summarise(SimpleNamespace(name=name, lines=lines) for name, lines in planes)
    assert found.wall == 20
    assert [(p.name, p.start, p.end, p.busy) for p in found.programs] == [
        ("jit_put", 6, 9, 1.5),
        ("jit_roll", 10, 13, 3),
        ("jit_put", 14, 15, 1),
    ]
    assert [(s.name, s.start, s.end) for s in found.streams] == [
        ("Stream #1", 6, 15),
        ("Stream #2", 2, 6),
    ]
    assert ("jit_roll", "gemm", 3, 2) in found.kernels
    assert ("", "MemcpyH2D", 4, 1) in found.kernels
    assert "jit_roll" in show(found)


def test_a_profile_without_the_request_is_an_error() -> None:
    planes = [SimpleNamespace(name="/host:CPU", lines=[line("python", event("other", 1, 1))])]
    with pytest.raises(RuntimeError, match="0 events named ttft_request"):
        summarise(planes)


def test_what_the_host_does_is_shown_as_it_nests() -> None:
    names = (("before", -2, 1), ("step", 1, 10), ("match", 2, 1), ("send", 4, 1), ("send", 6, 2))
    spans = [event(PREFIX + name, start, duration) for name, start, duration in names]
    thread = line("python", event(REQUEST, 0, 20), *spans, event(PREFIX + "wait", 12, 7))
    kernels = [event("gemm", -1, 0.5, "jit_take"), event("gemm", 9, 4, "jit_draw")]
    planes = (("/host:CPU", [thread]), ("/device:GPU:0", [line("Stream #1", *kernels)]))
    found = summarise(SimpleNamespace(name=name, lines=lines) for name, lines in planes)
    assert [(s.name, s.start, s.end, s.busy, s.events) for s in found.host] == [
        ("step", 1, 11, 10, 1),
        ("  match", 2, 3, 1, 1),
        ("  send", 4, 8, 3, 2),
        ("wait", 12, 19, 7, 1),
    ]
    assert [p.name for p in found.programs] == ["jit_draw"]  # what came before is not the request's
    assert "first on the device at 9.00, answer 7.00 after the draw" in show(found)


def test_a_trace_has_the_spans_of_a_request_and_stays(tmp_path: Path) -> None:
    @host_span("work")
    def work() -> None:
        with host_span("part"):
            jax.numpy.zeros(3).block_until_ready()

    def request() -> None:
        work()
        with jax.profiler.TraceAnnotation(REQUEST):
            work()

    found = record(request, tmp_path / "trace")
    assert [(s.name, s.events) for s in found.host] == [("work", 1), ("  part", 1)]
    assert 0 <= found.host[0].start <= found.host[1].start < found.host[0].end <= found.wall
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
