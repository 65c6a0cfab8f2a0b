"""Which options a function is compiled with, and that it is compiled once for a bucket."""

from __future__ import annotations

from typing import Any

import pytest

from jhybrid.engine.programs import COMPILER_OPTIONS, PREFILL, Programs


class Lowered:
    """In place of a jitted function: its executable gives the options that it was compiled with."""

    def lower(self, *args: Any) -> Lowered:
        return self

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        return lambda *args: compiler_options


@pytest.mark.parametrize("platform", ["cpu", "gpu", "other"])
def test_what_somebody_waits_for_is_launched_kernel_by_kernel_on_a_gpu(platform: str) -> None:
    programs = Programs(dict.fromkeys((*PREFILL, "replay", "decode"), Lowered()), platform)
    plain = COMPILER_OPTIONS.get(platform, {})
    for name, tokens in (("decode", 8), ("decode", 1024), ("replay", 64), ("replay", 255)):
        assert programs.call(name, (tokens,)) == plain
    graphs_off = {"xla_gpu_enable_command_buffer": ""} if platform == "gpu" else {}
    for name, tokens in (("replay", 256), ("replay", 1792), *((name, 32) for name in PREFILL)):
        assert programs.call(name, (tokens,)) == {**plain, **graphs_off}


def test_a_bucket_is_compiled_once() -> None:
    programs = Programs({"decode": Lowered()}, "cpu")
    for size in ((8,), (8,), (16,)):
        programs.call("decode", size)
    assert programs.compilations() == 2
