"""The log of a training, beside the weights that came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOG = "train_log.jsonl"


class Log:
    """A new one in `folder`: one record a line, on disk as soon as written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG
        self._path.write_text("")

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = {k: v for k, v in record.items() if k not in ("samples", "initial_horizons")}
        print(json.dumps(shown), flush=True)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All records. Raises ValueError naming the folder where it holds no log."""
    path = folder / LOG
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a trained model's folder has the log of it")
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_of_start(folder: Path, preset: str) -> list[dict[str, Any]]:
    """What a model of a preset that goes on from these weights has before its own log: theirs,
    without what was measured of them. Raises ValueError naming the folder: no log, or another
    preset's."""
    log = read_log(folder)
    found = [record["preset"] for record in log if record["kind"] == "start"]
    if set(found) != {preset}:
        of = ", ".join(dict.fromkeys(found)) or "nothing"
        raise ValueError(f"{folder}: expected a training of preset {preset}, got one of {of}")
    return [record for record in log if record["kind"] != "evaluation"]
