"""Names for what the host does in a step, in the trace of a profiler, beside what the device does.

Nothing is kept while nobody traces; a span then costs a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

PREFIX = "host: "  # of the names in a trace


@contextmanager
def host_span(name: str) -> Iterator[None]:
    """Around some lines, or as a decorator. Spans may hold others."""
    with jax.profiler.TraceAnnotation(PREFIX + name):
        yield
