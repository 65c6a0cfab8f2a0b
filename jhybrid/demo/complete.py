"""Measures what a training run had no time for, and writes the card again.

    python -m jhybrid.demo.complete FOLDER --corpus DIR

Appends to the folder's train_log.jsonl whatever is not in it: what was left out, what failed, and
what a run that was killed had not come to. On two cores of a CPU the samples take some minutes, and
the evaluation's tasks a good deal longer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from ..hf_config import model_config, read_hf_config
from ..sharding import make_mesh
from ..weights import load_hf_params
from .card import write_card
from .clock import Clock
from .corpus import Corpus
from .evaluate import evaluate
from .log import LOG, read_log
from .presets import PRESETS
from .score import THRESHOLDS, make_sheet


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="jhybrid.demo.complete", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the model")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the three texts")
    args = parser.parse_args(arguments)
    log = read_log(args.folder)
    start = next(record for record in log if record["kind"] == "start")
    results = [record for record in log if record["kind"] == "evaluation"]
    # a measurement that was left out, or failed, is a remark
    done = {name for r in results for name, value in r.items() if not isinstance(value, str)}
    config = model_config(read_hf_config(args.folder))
    params = load_hf_params(args.folder, config, make_mesh(1), jnp.float32)
    preset, clock = PRESETS[start["preset"]], Clock(float("inf"), 0)
    corpus = Corpus.load(args.corpus)
    sheets = {}
    if "benchmark" not in done:
        sheets = {
            (task, length): make_sheet(args.corpus, task, length, preset.scored)
            for length in preset.scored_lengths
            for task in THRESHOLDS
        }
    where = jax.devices()[0].device_kind
    for name, value in evaluate(params, config, preset, corpus, sheets, clock, start["seed"], done):
        with (args.folder / LOG).open("a") as file:
            record = {"kind": "evaluation", name: value, "device": where}
            file.write(json.dumps(record) + "\n")
    write_card(args.folder)


if __name__ == "__main__":
    main()
