"""A profile in, programs and transfers by time out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jhybrid.eval.ttft_timeline import REQUEST, show, summarise


def event(name: str, start: float, duration: float) -> Any:
    return SimpleNamespace(name=name, start_ns=1e6 * (5 + start), duration_ns=1e6 * duration)


def plane(name: str, **lines: list[Any]) -> Any:
    named = [SimpleNamespace(name=k.replace("_", " "), events=v) for k, v in lines.items()]
    return SimpleNamespace(name=name, lines=named)


def test_programs_streams_and_kernels_of_a_request() -> None:
    host = plane("/host:CPU", python=[event(REQUEST, 0, 20), event("other", 1, 1)])
    modules = [event("jit_put(12)", 6, 1), event("jit_put(12)", 8, 1), event("jit_roll(3)", 10, 5)]
    kernels = [event("scatter.1", 6, 0.5), event("gemm_7", 10, 2), event("gemm_8", 12, 1)]
    device = plane("/device:GPU:0", XLA_Modules=modules, Stream_1=kernels)
    device.lines.append(SimpleNamespace(name="Stream 2", events=[event("MemcpyH2D", 2, 4)]))
    found = summarise([host, device])
    assert found.wall == 20
    assert [(p.name, p.start, p.end, p.busy) for p in found.programs] == [
        ("jit_put", 6, 9, 2),
        ("jit_roll", 10, 15, 5),
    ]
    assert [(s.name, s.start, s.end) for s in found.streams] == [
        ("Stream 1", 6, 13),
        ("Stream 2", 2, 6),
    ]
    assert ("jit_roll", "gemm", 3, 2) in found.kernels
    assert ("none", "MemcpyH2D", 4, 1) in found.kernels
    assert "jit_roll" in show(found)


def test_a_profile_without_the_request_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="0 events named ttft_request"):
        summarise([plane("/host:CPU", python=[event("other", 1, 1)])])
