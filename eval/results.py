"""Result records: one JSON line each, with everything needed to know where a number came from."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jhybrid.engine.build import versions

from .store import whole_lines
from .tasks.sources import read_text


@dataclass(frozen=True)
class Provenance:
    """What all records of a run share."""

    commit: str
    versions: dict[str, str]
    device: str
    command: str


@dataclass(frozen=True)
class Result:
    """One measured value. `n` is how many observations it summarises."""

    suite: str
    case: str
    arm: str
    metric: str
    value: float
    unit: str
    n: int


def provenance() -> Provenance:
    device = jax.devices()[0]
    return Provenance(
        commit=_commit(),
        versions=versions(),
        device=f"{len(jax.devices())} x {device.device_kind} ({device.platform})",
        command="python -m jhybrid.eval " + command_line(sys.argv[1:]),
    )


def command_line(arguments: list[str]) -> str:
    """The arguments as a shell takes them, but for the folder of --out: it is of one machine."""
    words, after = list[str](), ""
    for word in arguments:
        name, given, _ = word.partition("=")
        if after == "--out":
            word = "OUT"
        elif name == "--out" and given:
            word = "--out=OUT"
        words.append(word)
        after = word
    return shlex.join(words)


def _commit() -> str:
    """The checkout's commit, marked when files differ from it; "unknown" outside a checkout."""

    def git(*args: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "-s") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Records of DIR/results.jsonl, or of the same packed (.xz, .gz).

    Of several with one key (suite, case, arm, metric) the last. A last line cut off by a kill is
    none.
    """
    names = [f"results.jsonl{ending}" for ending in ("", ".xz", ".gz")]
    path = next((folder / n for n in names if (folder / n).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder}: holds no {names[0]} (plain, .xz or .gz)")
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in read_text(path).split("\n")[:-1]:
        if line:
            record = json.loads(line)
            found[tuple(record[name] for name in ("suite", "case", "arm", "metric"))] = record
    return list(found.values())


class ResultsFile:
    """Appends records to DIR/results.jsonl as they are made, so that a kill loses none.

    A record that is there already, from the same commit and command, is not written again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        self._lines = set(whole_lines(self._path))
        self._shared = asdict(provenance())

    def append(self, result: Result) -> dict[str, Any]:
        record = {**asdict(result), **self._shared}
        line = json.dumps(record)
        if line not in self._lines:
            self._lines.add(line)
            with self._path.open("a") as file:
                file.write(line + "\n")
        return record
