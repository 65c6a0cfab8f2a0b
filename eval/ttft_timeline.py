"""Where the time of one request goes: what the host does, and programs and transfers on the device,
by when they ran, all from one trace."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jhybrid.engine.host_spans import PREFIX

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
    """`host` in order of their start, indented by the spans they are in; `programs` likewise, one
    for each time that another one takes over; `streams` of transfers and kernels; `kernels`
    (program, kernel, milliseconds, launches)."""

    wall: float
    host: list[Span]
    programs: list[Span]
    streams: list[Span]
    kernels: list[tuple[str, str, float, int]]


class _Event(NamedTuple):
    start: float
    duration: float
    name: str
    program: str


def record(request: Callable[[], Any], folder: Path) -> Timeline:
    """Runs it once under JAX's profiler, which slows it a little; Python calls are not traced. What
    it does under an annotation REQUEST is what counts. The trace stays in `folder`, a new one."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        request()
    path = next(folder.rglob("*.xplane.pb"))
    return summarise(jax.profiler.ProfileData.from_file(str(path)).planes)


def summarise(planes: Iterable[Any]) -> Timeline:
    """From the planes of a profile: RuntimeError where the request is not in it."""
    planes = list(planes)
    threads = [list(line.events) for plane in planes for line in plane.lines]
    requests = [(e, events) for events in threads for e in events if e.name == REQUEST]
    if len(requests) != 1:
        raise RuntimeError(f"{len(requests)} events named {REQUEST} in the profile, expected one")
    [(request, thread)] = requests
    origin, wall = request.start_ns, 1e-6 * request.duration_ns
    streams: dict[str, list[_Event]] = {}
    for plane in planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                events = sorted(_event(event, origin) for event in line.events)
                found = [event for event in events if event.start >= 0]
                if line.name.startswith("Stream") and found:
                    streams[line.name] = found
    launched = sorted(event for events in streams.values() for event in events)
    spent: Counter[tuple[str, str]] = Counter()
    launches: Counter[tuple[str, str]] = Counter()
    for event in launched:
        spent[event.program, event.name] += event.duration  # pyright: ignore[reportArgumentType]
        launches[event.program, event.name] += 1
    runs = itertools.groupby((e for e in launched if e.program), key=lambda e: e.program)
    return Timeline(
        wall,
        _host_spans(_event(e, origin) for e in thread if e.name.startswith(PREFIX)),
        [_span(program, list(events)) for program, events in runs],
        [_span(name, events) for name, events in streams.items()],
        [(*key, time, launches[key]) for key, time in spent.most_common()],
    )


def _host_spans(events: Iterable[_Event]) -> list[Span]:
    """One for each of them, or for several of a name that follow one another."""
    spans, around = list[Span](), list[float]()  # ends of the spans that an event is in
    for event in sorted(events, key=lambda e: (e.start, -e.duration)):
        if event.start < 0:
            continue
        end = event.start + event.duration
        while around and around[-1] <= event.start:
            around.pop()
        name = "  " * len(around) + event.name.removeprefix(PREFIX)
        around.append(end)
        if spans and spans[-1].name == name:
            last = spans.pop()
            busy, count = last.busy + event.duration, last.events + 1
            spans.append(Span(name, last.start, end, busy, count))
        else:
            spans.append(Span(name, event.start, end, event.duration, 1))
    return spans


def _event(event: Any, origin: float) -> _Event:
    program = next((str(value) for name, value in event.stats if name == "hlo_module"), "")
    name = re.sub(r"[._]\d+$", "", event.name)
    return _Event(1e-6 * (event.start_ns - origin), 1e-6 * event.duration_ns, name, program)


def _span(name: str, events: list[_Event]) -> Span:
    end = max(e.start + e.duration for e in events)
    return Span(name, events[0].start, end, sum(e.duration for e in events), len(events))


def show(timeline: Timeline, top: int = 24) -> str:
    """Lines to read; times in ms from the start of the request."""
    lines = [f"request {timeline.wall:.2f} ms"]
    draws = [span.end for span in timeline.programs if "draw" in span.name]
    if draws:
        first = min(span.start for span in timeline.streams)
        left = timeline.wall - draws[-1]
        lines[0] += f", first on the device at {first:.2f}, answer {left:.2f} after the draw"
    parts = ("host", timeline.host), ("program", timeline.programs), ("stream", timeline.streams)
    for title, spans in parts:
        for s in spans:
            lines.append(
                f"  {title:8}{s.start:8.2f} to {s.end:8.2f}, busy {s.busy:8.2f}, "
                f"{s.events:5} x {s.name[:60]}"
            )
    for program, kernel, time, count in timeline.kernels[:top]:
        lines.append(f"  kernel {time:9.3f} ms {count:6} x {program[:24]:24} {kernel[:80]}")
    return "\n".join(lines)
