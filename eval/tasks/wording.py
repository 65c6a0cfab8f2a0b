"""Task wording: one JSON file a task, in a folder that a user may replace.

`ruler` follows the structure of the published prompts in our own words; `plain` is shorter and
simpler, for small models. A folder of the user's holds any of the same files; those it lacks are
taken from `ruler`. `generation.json` may say what ends an answer ({"stop": ["\\n"]}).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jhybrid.config import require

FOLDER = Path(__file__).resolve().parents[1] / "wording"
BUNDLED = ("ruler", "plain")


class Wording:
    def __init__(self, name: str = "ruler") -> None:
        """`name` is a bundled set or a folder."""
        folder = FOLDER / name if name in BUNDLED else Path(name)
        known = f"{', '.join(BUNDLED)} or an existing folder"
        require(folder.is_dir(), "wording", name, known)
        self._folders = (folder, FOLDER / "ruler")

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends an answer in this wording; nothing, unless its own folder says so."""
        path = self._folders[0] / "generation.json"
        if not path.is_file():
            return ()
        return tuple(Template(path, json.loads(path.read_text(encoding="utf-8"))).raw("stop"))

    def task(self, name: str) -> Template:
        for folder in self._folders:
            path = folder / f"{name}.json"
            if path.is_file():
                return Template(path, json.loads(path.read_text(encoding="utf-8")))
        raise ValueError(f"wording: no {name}.json in {self._folders[0]}")


class Template:
    """The texts of one task. `text("question", keys=...)` fills one in."""

    def __init__(self, path: Path, texts: dict[str, Any]) -> None:
        self._path, self._texts = path, texts

    def raw(self, part: str) -> Any:
        require(part in self._texts, f"{self._path}: {part}", None, "a text")
        return self._texts[part]

    def text(self, part: str, **values: Any) -> str:
        try:
            return self.raw(part).format(**values)
        except (KeyError, IndexError) as error:
            names = ", ".join(values) or "none"
            raise ValueError(
                f"{self._path}: {part} names {error}, which is not a value it gets ({names})"
            ) from None
