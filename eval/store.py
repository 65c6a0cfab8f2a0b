"""What a run has generated so far: append-only lines, so that a kill loses nothing that was done.

A line's key names suite, settings, arm, case, problem and replay; of several lines with one key
the first counts. The settings' digest covers the model, its weights, the flags and the sampling, so
that a run never takes over answers that were made otherwise.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def digest(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file, none if there is no file. One that a kill has cut off is taken off it,
    so that the next does not go on in the middle."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.decode("utf-8").split("\n")[:-1]


class Store:
    """Records of DIR/NAME.jsonl by their key. A last line cut off by a kill is dropped."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        self._records: dict[str, Record] = {}
        for number, line in enumerate(whole_lines(self._path), start=1):
            try:
                record = json.loads(line)
                self._records.setdefault(record["key"], record)
            except (json.JSONDecodeError, KeyError) as error:
                raise ValueError(f"{self._path}:{number}: not a record: {error}") from None

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Record:
        return self._records[key]

    def __len__(self) -> int:
        return len(self._records)

    def append(self, key: str, record: Record) -> None:
        """Nothing happens when the key is there already."""
        if key in self._records:
            return
        line = {"key": key, **record}
        self._records[key] = line
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
