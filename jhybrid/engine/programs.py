"""Compiled functions: with which options, and the table of those that are there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from .host_spans import host_span

Shape = tuple[int, ...]
Call = tuple[str, Shape, tuple[Any, ...]]  # a function, a bucket, arguments of the right shapes

Options = dict[str, bool | int | float | str]

# The code is as fast as with full optimisation and is there a third sooner.
CPU_OPTIONS: Options = {"xla_backend_optimization_level": 1}
# Tuning compiles dozens of Triton kernels for every shape of a product, most of a start's time, and
# then chooses cuBLAS. Merged products would copy their weights into one matrix in every step.
GPU_OPTIONS: Options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
COMPILER_OPTIONS = {"cpu": CPU_OPTIONS, "gpu": GPU_OPTIONS}
PREFILL = ("prefill-lower", "prefill-upper")


def compiler_options(platform: str) -> Options:
    return COMPILER_OPTIONS.get(platform, {})


def compile_side_by_side(
    calls: Sequence[tuple[Any, tuple[Any, ...]]], options: Options
) -> Iterator[tuple[int, Any]]:
    """Compile jitted functions, each for arguments like these; the place and the executable of each
    as it gets done.

    Python lowers one at a time and in order, whatever the number of threads: together they would
    only take turns, and none would reach XLA, which does work side by side, until all do.
    """

    def compile_one(place: int, lowered: Future[Any]) -> tuple[int, Any]:
        return place, lowered.result().compile(compiler_options=options)

    with ThreadPoolExecutor(1) as python, ThreadPoolExecutor(os.cpu_count()) as xla:
        lowered = [python.submit(function.lower, *args) for function, args in calls]
        jobs = [xla.submit(compile_one, *item) for item in enumerate(lowered)]
        for job in as_completed(jobs):
            yield job.result()


class Programs:
    """Jitted functions by name, and their executables by name and bucket."""

    def __init__(self, functions: dict[str, Any], platform: str) -> None:
        self.executables: dict[tuple[str, Shape], Any] = {}
        self.functions, self._options = functions, compiler_options(platform)

    def call(self, name: str, size: Shape, *args: Any) -> Any:
        """Run a function at a bucket, compiling it if the warm-up has not."""
        executable = self.executables.get((name, size))
        if executable is None:
            executable = self.executables[name, size] = self.compile(name, args)
        with host_span(f"call {name}"):
            return executable(*args)

    def compile(self, name: str, args: tuple[Any, ...]) -> Any:
        """A new executable, which the table does not hold."""
        return self.functions[name].lower(*args).compile(compiler_options=self._options)

    def compile_all(self, calls: Sequence[Call]) -> Iterator[tuple[str, Shape]]:
        """Fill the table, several at once; function and bucket of each as it gets done."""
        items = [(self.functions[name], args) for name, _, args in calls]
        for place, executable in compile_side_by_side(items, self._options):
            name, size, _ = calls[place]
            self.executables[name, size] = executable
            yield name, size

    def compilations(self) -> int:
        """How many shapes have been compiled so far, over all functions."""
        return len(self.executables)
