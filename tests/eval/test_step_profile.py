"""Suite `profile`: the steps that it makes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import jax
import numpy as np
import pytest

from jhybrid.eval.step_profile import Step, make_call, median_seconds, run
from tests.engine.tiny import tiny_engine


@pytest.mark.parametrize("step", ["replay:20", "prefill:16:20", "decode:2:20"])
def test_a_step_runs_as_often_as_asked(step: str) -> None:
    runner = tiny_engine(recovery="tail-replay").runner
    before = np.asarray(runner.caches.recurrent[0])
    assert median_seconds(make_call(runner, Step.parse(step))) > 0
    after = np.asarray(jax.block_until_ready(runner.caches.recurrent[0]))
    assert np.isfinite(after).all() and (after != before).any()


def test_a_device_that_is_no_gpu_has_no_times(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        run(Namespace(out=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_replay_needs_group_inputs() -> None:
    runner = tiny_engine().runner
    with pytest.raises(ValueError, match="group_inputs"):
        make_call(runner, Step.parse("replay:20"))
