"""Where the time of one request goes: programs and transfers on the device, by when they ran."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

REQUEST = "ttft_request"  # the host's annotation around the request


@dataclass(frozen=True)
class Span:
    """Milliseconds from the start of the request; `busy` of them something ran."""

    name: str
    start: float
    end: float
    busy: float
    events: int


@dataclass(frozen=True)
class Timeline:
    """`programs` in order of their start, those of one name that follow one another as one;
    `streams` of transfers and kernels; `kernels` (program, kernel, milliseconds, launches)."""

    wall: float
    programs: list[Span]
    streams: list[Span]
    kernels: list[tuple[str, str, float, int]]


def record(request: Callable[[], Any]) -> Timeline:
    """Runs it once under JAX's profiler, which slows it a little."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder), jax.profiler.TraceAnnotation(REQUEST):
            request()
        path = next(Path(folder).rglob("*.xplane.pb"))
        return summarise(jax.profiler.ProfileData.from_file(str(path)).planes)


def summarise(planes: Iterable[Any]) -> Timeline:
    """From the planes of a profile: RuntimeError where the request is not in it."""
    planes = list(planes)
    requests = [
        event for plane in planes for line in plane.lines for event in line.events
        if event.name == REQUEST
    ]  # fmt: skip
    if len(requests) != 1:
        raise RuntimeError(f"{len(requests)} events named {REQUEST} in the profile, expected one")
    origin = requests[0].start_ns
    programs: list[Span] = []
    streams: list[Span] = []
    launched: list[tuple[str, float, float]] = []
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            events = sorted(
                (re.sub(r"(\(\d+\)|[._]\d+)$", "", event.name),
                 1e-6 * (event.start_ns - origin), 1e-6 * event.duration_ns)
                for event in line.events
            )  # fmt: skip
            if not events:
                continue
            if line.name == "XLA Modules":
                programs += _runs(sorted(events, key=lambda event: event[1]))
            elif line.name.startswith("Stream"):
                streams.append(_span(line.name, events))
                launched += events
    return Timeline(
        1e-6 * requests[0].duration_ns, programs, streams, _by_program(programs, launched)
    )


def _span(name: str, events: list[tuple[str, float, float]]) -> Span:
    start, end = min(e[1] for e in events), max(e[1] + e[2] for e in events)
    return Span(name, start, end, sum(e[2] for e in events), len(events))


def _runs(events: list[tuple[str, float, float]]) -> list[Span]:
    """Events of one name in a row as one span."""
    runs: list[list[tuple[str, float, float]]] = []
    for event in events:
        if runs and runs[-1][-1][0] == event[0]:
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_span(run[0][0], run) for run in runs]


def _by_program(
    programs: list[Span], launched: list[tuple[str, float, float]]
) -> list[tuple[str, str, float, int]]:
    """Kernels added up by the program they ran in, the longest first."""
    spent: Counter[tuple[str, str]] = Counter()
    launches: Counter[tuple[str, str]] = Counter()
    for kernel, start, duration in launched:
        owner = next((p.name for p in programs if p.start <= start <= p.end), "none")
        spent[owner, kernel] += duration  # type: ignore[assignment]
        launches[owner, kernel] += 1
    return [(*key, time, launches[key]) for key, time in spent.most_common()]


def show(timeline: Timeline, top: int = 24) -> str:
    """Lines to read; times in ms from the start of the request."""
    lines = [f"request {timeline.wall:.2f} ms"]
    for title, spans in (("program", timeline.programs), ("stream", timeline.streams)):
        for s in spans:
            lines.append(
                f"  {title:8}{s.start:8.2f} to {s.end:8.2f}, busy {s.busy:8.2f}, "
                f"{s.events:5} x {s.name[:60]}"
            )
    for program, kernel, time, count in timeline.kernels[:top]:
        lines.append(f"  kernel {time:9.3f} ms {count:6} x {program[:24]:24} {kernel[:80]}")
    return "\n".join(lines)
