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
# A CUDA graph starts when all of its nodes have been given the addresses of a call. A prefill has
# hundreds of nodes, each with more to do than a launch takes, and somebody waits for the first one.
# So has a replay, but for one of few tokens, which has more launches than work.
LAUNCHED: Options = {"xla_gpu_enable_command_buffer": ""}
PREFILL = ("prefill-lower", "prefill-upper")
LONG_REPLAY = 256  # tokens


def compiler_options(platform: str, name: str = "", size: Shape = ()) -> Options:
    """Those of an engine's function `name` at a bucket, or of any other function."""
    options = COMPILER_OPTIONS.get(platform, {})
    one_by_one = name in PREFILL or (name == "replay" and size[0] >= LONG_REPLAY)
    return options | LAUNCHED if platform == "gpu" and one_by_one else options


def compile_side_by_side(
    calls: Sequence[tuple[Any, tuple[Any, ...], Options]],
) -> Iterator[tuple[int, Any]]:
    """Compile jitted functions, each for arguments like these and with these options; the place and
    the executable of each as it gets done.

    Python lowers one at a time and in order, whatever the number of threads: together they would
    only take turns, and none would reach XLA, which does work side by side, until all do.
    """

    def compile_one(place: int, lowered: Future[Any]) -> tuple[int, Any]:
        return place, lowered.result().compile(compiler_options=calls[place][2])

    with ThreadPoolExecutor(1) as python, ThreadPoolExecutor(os.cpu_count()) as xla:
        lowered = [python.submit(function.lower, *args) for function, args, _ in calls]
        jobs = [xla.submit(compile_one, *item) for item in enumerate(lowered)]
        for job in as_completed(jobs):
            yield job.result()


class Programs:
    """Jitted functions by name, and their executables by name and bucket."""

    def __init__(self, functions: dict[str, Any], platform: str) -> None:
        self.executables: dict[tuple[str, Shape], Any] = {}
        self.functions, self._platform = functions, platform

    def call(self, name: str, size: Shape, *args: Any) -> Any:
        """Run a function at a bucket, compiling it if the warm-up has not."""
        executable = self.executables.get((name, size))
        if executable is None:
            executable = self.executables[name, size] = self.compile(name, size, args)
        with host_span(f"call {name}"):
            return executable(*args)

    def compile(self, name: str, size: Shape, args: tuple[Any, ...]) -> Any:
        """A new executable, which the table does not hold."""
        options = compiler_options(self._platform, name, size)
        return self.functions[name].lower(*args).compile(compiler_options=options)

    def compile_all(self, calls: Sequence[Call]) -> Iterator[tuple[str, Shape]]:
        """Fill the table, several at once; function and bucket of each as it gets done."""
        items = [
            (self.functions[name], args, compiler_options(self._platform, name, size))
            for name, size, args in calls
        ]
        for place, executable in compile_side_by_side(items):
            name, size, _ = calls[place]
            self.executables[name, size] = executable
            yield name, size

    def compilations(self) -> int:
        """How many shapes have been compiled so far, over all functions."""
        return len(self.executables)
