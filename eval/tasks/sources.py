"""Data that is not shipped: where it is looked for, and where it is published."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """A published file: names it may have below the data folder, with or without .gz or .xz."""

    names: tuple[str, ...]
    published: str


_LONGBENCH = "LongBench v1, data.zip of the data set THUDM/LongBench"
SOURCES = {
    "essays": Source(
        ("essays.txt", "PaulGrahamEssays.json"),
        "any long English text; RULER itself uses Paul Graham's essays (paulgraham.com)",
    ),
    "squad": Source(
        ("dev-v2.0.json", "squad.json", "squad_small.json"),
        "SQuAD 2.0, dev-v2.0.json (rajpurkar.github.io/SQuAD-explorer)",
    ),
    "hotpotqa_dev": Source(
        ("hotpot_dev_distractor_v1.json", "hotpotqa_dev.json", "hotpotqa_100.json"),
        "HotpotQA, hotpot_dev_distractor_v1.json (hotpotqa.github.io)",
    ),
    "narrativeqa": Source(("narrativeqa.jsonl",), _LONGBENCH),
    "qasper": Source(("qasper.jsonl",), _LONGBENCH),
    "hotpotqa": Source(("hotpotqa.jsonl", "hotpotqa_100.json"), _LONGBENCH),
    "musique": Source(("musique.jsonl", "musique_100.jsonl"), _LONGBENCH),
    "qmsum": Source(("qmsum.jsonl", "qmsum_ami_7.jsonl"), _LONGBENCH),
    "locomo": Source(("locomo10.json",), "github.com/snap-research/LoCoMo, data/locomo10.json"),
    "mmlu_pro": Source(
        ("mmlu_pro_test.jsonl", "mmlu_pro.jsonl"), "the data set TIGER-Lab/MMLU-Pro, test split"
    ),
    "mmlu_pro_examples": Source(
        ("mmlu_pro_validation.jsonl",), "the data set TIGER-Lab/MMLU-Pro, validation split"
    ),
    "gpqa": Source(
        ("gpqa_diamond.csv",),
        "github.com/idavidrein/gpqa, gpqa_diamond.csv (password in its README)",
    ),
    "aime": Source(
        ("aime_2026.jsonl", "aime_2026.json", "aime_2026.csv"), "the data sets MathArena/aime_2026"
    ),
    "hmmt": Source(
        ("hmmt_feb_2026.jsonl", "hmmt_feb_2026.json", "hmmt_feb_2026.csv"),
        "the data set MathArena/hmmt_feb_2026",
    ),
    "imo": Source(
        ("answerbench_v2.csv",),
        "github.com/google-deepmind/superhuman, imobench/answerbench_v2.csv",
    ),
    "sharegpt": Source(
        ("ShareGPT_V3_unfiltered_cleaned_split.json", "sharegpt.json"),
        "the data set anon8231489123/ShareGPT_Vicuna_unfiltered",
    ),
}


def locate(folder: Path | None, name: str) -> Path:
    """The file of a source below `folder`. FileNotFoundError says which and where to get it."""
    source = SOURCES[name]
    endings = ("", ".gz", ".xz")
    if folder is not None:
        for wanted in source.names:
            for ending in endings:
                found = sorted(folder.rglob(wanted + ending))
                if found:
                    return found[0]
    where = "no --data folder was given" if folder is None else f"nothing like it below {folder}"
    raise FileNotFoundError(
        f"{name} needs {' or '.join(source.names)} (plain, .gz or .xz): {where}. "
        f"Published as: {source.published}"
    )


def read_text(path: Path) -> str:
    match path.suffix:
        case ".gz":
            return gzip.decompress(path.read_bytes()).decode("utf-8")
        case ".xz":
            return lzma.decompress(path.read_bytes()).decode("utf-8")
        case _:
            return path.read_text(encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON list, a JSON-lines or a CSV file, by its name."""
    text = read_text(path)
    kind = path.name.removesuffix(".gz").removesuffix(".xz").rpartition(".")[2]
    match kind:
        case "jsonl":
            return list(_lines(path, text))
        case "csv":
            import csv
            import io

            return list(csv.DictReader(io.StringIO(text)))
        case _:
            records = json.loads(text)
            if not isinstance(records, list):
                raise ValueError(f"{path}: expected a list of records, got a {type(records)}")
            return records


def _lines(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None


def field(record: dict[str, Any], name: str, path: Path) -> Any:
    if name not in record:
        have = ", ".join(record)
        raise ValueError(f"{path}: a record has no field {name!r}, only {have}")
    return record[name]
