"""Make the golden Qwen3.5 checkpoints beside this file (see tests/golden_files.py).

python tests/golden/make_qwen3_5.py        # from the root of the repository; needs torch
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.golden_files import write_expected  # noqa: E402
from tests.hf_fixtures import CASES, Case, make_checkpoint  # noqa: E402

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 32}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
NAMES = ("text_tied", "vl_untied", "text_odd_sizes")


def shrunk(case: Case) -> Case:
    text = case.text | {"rope_parameters": ROPE}
    return replace(case, text=(text | SMALL) if "odd" not in case.name else SMALL | text)


def make(case: Case, seed: int) -> None:
    folder = HERE / "qwen3_5" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder, case, seed)
    write_expected(folder, shrunk(case).text["vocab_size"], seed)


if __name__ == "__main__":
    for number, one in enumerate(case for case in CASES if case.name in NAMES):
        # bfloat16 halves the files, and everything is computed in float32 all the same
        make(replace(shrunk(one), dtype="bfloat16"), seed=number)
