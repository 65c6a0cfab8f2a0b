"""Make the golden Kimi-Linear checkpoints beside this file (see tests/golden_files.py).

python tests/golden/make_kimi_linear.py        # from the root of the repository; needs torch
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.golden_files import write_expected  # noqa: E402
from tests.hf_fixtures import Case, routing_gap  # noqa: E402
from tests.kimi_fixtures import CASES, make_checkpoint, text_config  # noqa: E402

NAMES = ("direct_query", "query_low_rank")


def shrunk(case: Case) -> Case:
    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
    }
    linear = case.text["linear_attn_config"] | {"num_heads": 2}
    # bfloat16 halves the files, and everything is computed in float32 all the same
    return replace(case, text=case.text | small | {"linear_attn_config": linear}, dtype="bfloat16")


def make(case: Case) -> None:
    folder = HERE / "kimi_linear" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    make_checkpoint(folder, case)
    tokens = write_expected(folder, text_config(case)["vocab_size"], case.seed)
    gap = routing_gap(folder, tokens[None])
    assert gap > 1e-5, f"{case.name}: a choice of experts is too close to call ({gap}); reseed"


if __name__ == "__main__":
    for one in CASES:
        if one.name in NAMES:
            make(shrunk(one))
