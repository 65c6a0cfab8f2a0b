"""Compiled functions: with which options, and the table of those that are there."""

from __future__ import annotations

from typing import Any

Shape = tuple[int, ...]

Options = dict[str, bool | int | float | str]

# The code is as fast as with full optimisation and is there a third sooner.
CPU_OPTIONS: Options = {"xla_backend_optimization_level": 1}
# Tuning compiles dozens of Triton kernels for every shape of a product, most of a start's time, and
# then chooses cuBLAS. Merged products would copy their weights into one matrix in every step.
GPU_OPTIONS: Options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
COMPILER_OPTIONS = {"cpu": CPU_OPTIONS, "gpu": GPU_OPTIONS}
# A CUDA graph starts when all of its nodes have been given the addresses of a call. These have
# hundreds of nodes, each with more to do than a launch takes, and somebody waits for the first one.
LAUNCHED: Options = {"xla_gpu_enable_command_buffer": ""}
LAUNCHED_ONE_BY_ONE = ("prefill", "replay")


class Programs:
    """Jitted functions by name, and their executables by name and bucket."""

    def __init__(self, functions: dict[str, Any], platform: str) -> None:
        self.executables: dict[tuple[str, Shape], Any] = {}
        self._functions, self._platform = functions, platform

    def call(self, name: str, size: Shape, *args: Any) -> Any:
        """Run a function at a bucket, compiling it if the warm-up has not."""
        return self.prepare(name, size, args)(*args)

    def prepare(self, name: str, size: Shape, args: tuple[Any, ...]) -> Any:
        """The executable of a function at a bucket; compiled for `args` if it is not there."""
        executable = self.executables.get((name, size))
        if executable is None:
            executable = self.executables[name, size] = self.compile(name, args)
        return executable

    def compile(self, name: str, args: tuple[Any, ...]) -> Any:
        """A new executable, which the table does not hold."""
        options = COMPILER_OPTIONS.get(self._platform, {})
        if self._platform == "gpu" and name in LAUNCHED_ONE_BY_ONE:
            options = options | LAUNCHED
        return self._functions[name].lower(*args).compile(compiler_options=options)

    def compilations(self) -> int:
        """How many shapes have been compiled so far, over all functions."""
        return len(self.executables)
