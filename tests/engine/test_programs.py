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
def test_programs_are_compiled_with_the_options_of_their_platform(platform: str) -> None:
    programs = Programs({"decode": Lowered()}, platform)
    assert programs.call("decode", (8,)) == COMPILER_OPTIONS.get(platform, {})


def test_a_bucket_is_compiled_once() -> None:
    programs = Programs({"decode": Lowered()}, "cpu")
    for size in ((8,), (8,), (16,)):
        programs.call("decode", size)
    assert programs.compilations() == 2
