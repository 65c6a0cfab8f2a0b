"""Where the time of one request goes: programs and transfers on the device, by when they ran."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    """`programs` in order of their start, one for each time that another one takes over; `streams`
    of transfers and kernels; `kernels` (program, kernel, milliseconds, launches)."""

    wall: float
    programs: list[Span]
    streams: list[Span]
    kernels: list[tuple[str, str, float, int]]


class _Event(NamedTuple):
    start: float
    duration: float
    name: str
    program: str


def record(request: Callable[[], Any]) -> Timeline:
    """Runs it once under JAX's profiler, which slows it a little; Python calls are not traced."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            with jax.profiler.TraceAnnotation(REQUEST):
                request()
        path = next(Path(folder).rglob("*.xplane.pb"))
        return summarise(jax.profiler.ProfileData.from_file(str(path)).planes)


def summarise(planes: Iterable[Any]) -> Timeline:
    """From the planes of a profile: RuntimeError where the request is not in it."""
    planes = list(planes)
    everything = [event for plane in planes for line in plane.lines for event in line.events]
    requests = [event for event in everything if event.name == REQUEST]
    if len(requests) != 1:
        raise RuntimeError(f"{len(requests)} events named {REQUEST} in the profile, expected one")
    origin = requests[0].start_ns
    streams: dict[str, list[_Event]] = {}
    for plane in planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream") and line.events:
                    streams[line.name] = sorted(_event(event, origin) for event in line.events)
    launched = sorted(event for events in streams.values() for event in events)
    spent: Counter[tuple[str, str]] = Counter()
    launches: Counter[tuple[str, str]] = Counter()
    for event in launched:
        spent[event.program, event.name] += event.duration  # pyright: ignore[reportArgumentType]
        launches[event.program, event.name] += 1
    runs = itertools.groupby((e for e in launched if e.program), key=lambda e: e.program)
    return Timeline(
        1e-6 * requests[0].duration_ns,
        [_span(program, list(events)) for program, events in runs],
        [_span(name, events) for name, events in streams.items()],
        [(*key, time, launches[key]) for key, time in spent.most_common()],
    )


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
    for title, spans in (("program", timeline.programs), ("stream", timeline.streams)):
        for s in spans:
            lines.append(
                f"  {title:8}{s.start:8.2f} to {s.end:8.2f}, busy {s.busy:8.2f}, "
                f"{s.events:5} x {s.name[:60]}"
            )
    for program, kernel, time, count in timeline.kernels[:top]:
        lines.append(f"  kernel {time:9.3f} ms {count:6} x {program[:24]:24} {kernel[:80]}")
    return "\n".join(lines)
