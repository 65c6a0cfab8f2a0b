"""What a training that goes on from another's weights asks of that one's folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from jhybrid.demo import MODELS, train
from jhybrid.demo.log import Log, log_of_start, read_log


def test_a_log_goes_on_without_the_measurements(tmp_path: Path) -> None:
    start, step = {"kind": "start", "preset": "kda"}, {"kind": "step", "step": 1}
    log = Log(tmp_path)
    for record in (start, step, {"kind": "evaluation", "skills": {}}, start, step):
        log.write(record)
    assert len(read_log(tmp_path)) == 5
    assert log_of_start(tmp_path, "kda") == [start, step, start, step]


@pytest.mark.parametrize(
    ("preset", "lost", "expected"),
    [
        ("gdn", "train_log.jsonl", "train_log.jsonl: no such file"),
        ("kda", None, "expected a training of preset kda, got one of gdn"),
        ("tiny-gdn", None, "expected a training of preset tiny-gdn, got one of gdn"),
    ],
)
def test_a_start_without_a_log_or_of_another_preset_is_refused_at_once(
    preset: str, lost: str | None, expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / preset
    shutil.copytree(MODELS["demo"], folder)
    if lost is not None:
        (folder / lost).unlink()
    given = ["--corpus", "none", "--out", str(tmp_path / "out"), "--preset", preset]
    with pytest.raises(ValueError, match=re.escape(str(folder)) + ".*" + re.escape(expected)):
        train.main([*given, "--start-from", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [preset]
