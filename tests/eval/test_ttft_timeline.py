"""A profile in, programs and transfers by time out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jhybrid.eval.ttft_timeline import REQUEST, show, summarise


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
