"""Make the golden checkpoints beside this file: tiny weights, and what transformers computes.

    python tests/golden/make_qwen3_5.py        # from the root of the repository; needs torch

Each folder is a Hugging Face checkpoint plus `expected.npz`: token_ids [T], float32 logits
[T, vocab], a prompt and its greedy continuation.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from jhybrid.convert.verify import torch_logits  # noqa: E402
from tests.hf_fixtures import CASES, Case, greedy, make_checkpoint  # noqa: E402

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 32}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
NAMES = ("text_tied", "vl_untied", "text_odd_sizes")
PROMPT, NEW = 15, 64


def shrunk(case: Case) -> Case:
    text = case.text | {"rope_parameters": ROPE}
    return replace(case, text=(text | SMALL) if "odd" not in case.name else SMALL | text)


def make(case: Case, seed: int) -> None:
    folder = HERE / "qwen3_5" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder, case, seed)
    rng = np.random.default_rng(seed)
    vocab = shrunk(case).text["vocab_size"]
    token_ids = rng.integers(0, vocab, PROMPT + NEW).astype(np.int32)
    np.savez_compressed(
        folder / "expected.npz",
        token_ids=token_ids,
        logits=torch_logits(folder, token_ids[None])[0],
        prompt=token_ids[:PROMPT],
        continuation=np.array(greedy(folder, token_ids[:PROMPT], NEW), np.int32),
    )


if __name__ == "__main__":
    for number, one in enumerate(case for case in CASES if case.name in NAMES):
        # bfloat16 halves the files, and everything is computed in float32 all the same
        make(replace(shrunk(one), dtype="bfloat16"), seed=number)
