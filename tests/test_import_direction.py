"""The arrows of CONTRIBUTING.md: who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Package -> packages that it may not import.
FORBIDDEN = {
    "pallas_kernels": ("jhybrid",),
    "jhybrid/layers": ("jhybrid.models", "jhybrid.engine", "jhybrid.cache", "jhybrid.serve"),
    "jhybrid/models": ("jhybrid.engine", "jhybrid.cache", "jhybrid.serve"),
    "jhybrid/tokenizer": ("jhybrid.engine", "jhybrid.serve", "jhybrid.convert"),
    "jhybrid/retention": (
        "jhybrid.cache",
        "jhybrid.engine",
        "jhybrid.serve",
        "jhybrid.convert",
        "jhybrid.plan",
    ),
    "jhybrid/plan": ("jhybrid.serve", "jhybrid.eval"),
    "jhybrid/cache": ("jhybrid.engine", "jhybrid.serve", "jhybrid.models", "jax"),
    "jhybrid/engine": ("jhybrid.serve", "jhybrid.convert", "jhybrid.eval"),
    "jhybrid/serve": ("jhybrid.convert", "jhybrid.eval"),
    "convert": ("jhybrid.serve", "jhybrid.eval", "jhybrid.engine"),
}


def imported(path: Path) -> list[str]:
    """Absolute names of all modules that a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    if package[0] == "convert":
        package = ("jhybrid", *package)
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_point_one_way(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            for bad in FORBIDDEN[folder]:
                inside = name == bad or name.startswith(f"{bad}.")
                assert not inside, f"{path.relative_to(ROOT)} imports {name}"
