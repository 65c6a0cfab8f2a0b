"""Programs that are predicted are those that an engine runs."""

from __future__ import annotations

import numpy as np
import pytest

from jhybrid.engine.request import PrefixCacheOptions
from jhybrid.eval.used_programs import used_programs
from tests.engine.tiny import request, run, tiny_engine

NAMES = ("prefill", "decode", "draw", "set_lines", "add_pages")


@pytest.mark.parametrize(
    ("prompts", "length", "most"), [(1, 150, 64), (5, 30, 64), (3, 64, 64), (3, 450, 1024)]
)
def test_what_is_predicted_runs_and_nothing_else(prompts: int, length: int, most: int) -> None:
    engine = tiny_engine(max_running=8, max_prefill_tokens=most, own_programs=True, pages=400)
    predicted = used_programs(engine.runner, prompts, length)
    rng = np.random.default_rng(0)
    fresh = PrefixCacheOptions("off")
    run(
        engine,
        [
            request(
                f"r{n}", rng.integers(0, 200, length).tolist(), max_tokens=16, prefix_cache=fresh
            )
            for n in range(prompts)
        ],
    )
    ran = {key for key in engine.runner.programs.executables if key[0].startswith(NAMES)}
    idle = {key for key in predicted - ran if key[0] == "add_pages"}  # none needed a page so early
    assert ran == predicted - idle
