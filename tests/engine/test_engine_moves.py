"""The suite that times hits and demotions in an engine measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from jhybrid.eval.engine_moves import Load, decode_windows, hits
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.selection import select

from .tiny import TINY, assert_idle, tiny_engine, tiny_params


def test_hits_and_demotions_are_those_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = select(static_horizons(tiny_params(), TINY), 32)
    assert 0 < plan.kept_fraction < 1
    engine = tiny_engine(
        plan=plan,
        recovery="dasc-wr",
        w_max=32,
        pages=300,
        slots=16,
        compressed_slots=12,
        watermark=4,
        max_running=2,
    )
    load = Load(engine)
    measured = hits(load, 64, 4, 2, tmp_path)
    found = {arm: (len(seconds), tokens) for arm, (seconds, tokens) in measured.items()}
    assert found == {"dasc-nr": (2, 0), "dasc-wr": (2, plan.replay_window), "dense": (2, 0)}
    assert_idle(engine)
    shown = capsys.readouterr().out
    assert shown.count(" request ") == len(found) == len(list(tmp_path.iterdir()))
    assert shown.count("call prefill-lower") == 4  # one more, which refreshes

    windows = decode_windows(load, streams=2, rates=[1], steps=6, rounds=2)
    assert [window.demoted for window in windows[0]] == [0, 0]
    assert all(window.demoted >= 3 for window in windows[1])  # the last are still on their way
    assert load.compressed_free == 0
    engine.cache.check_integrity()
