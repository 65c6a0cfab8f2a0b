"""Which options a function is compiled with, and that it is compiled once for a bucket."""

from __future__ import annotations

from typing import Any

import pytest

from jhybrid.engine.programs import COMPILER_OPTIONS, Programs


class Lowered:
    """In place of a jitted function: its executable gives the options that it was compiled with."""

    def lower(self, *args: Any) -> Lowered:
        return self

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        return lambda *args: compiler_options


@pytest.mark.parametrize("platform", ["cpu", "gpu", "other"])
def test_only_prefills_on_a_gpu_are_launched_kernel_by_kernel(platform: str) -> None:
    names = ("prefill", "replay", "decode")
    programs = Programs(dict.fromkeys(names, Lowered()), platform)
    options = {name: programs.call(name, (8,)) for name in names}
    plain = COMPILER_OPTIONS.get(platform, {})
    assert options["decode"] == options["replay"] == plain
    graphs_off = {"xla_gpu_enable_command_buffer": ""} if platform == "gpu" else {}
    assert options["prefill"] == {**plain, **graphs_off}


def test_a_bucket_is_compiled_once() -> None:
    programs = Programs({"decode": Lowered()}, "cpu")
    for size in ((8,), (8,), (16,)):
        programs.call("decode", size)
    assert programs.compilations() == 2
