"""Make the golden Qwen and OLMo-Hybrid checkpoints beside this file (see tests/golden_files.py).

python tests/golden/make_golden.py [FAMILY ...]    # from the root of the repository; needs torch
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from jhybrid.hf_config import model_config, read_hf_config  # noqa: E402
from tests import hf_fixtures, olmo_fixtures, qwen_moe_fixtures  # noqa: E402
from tests.golden_files import write_expected  # noqa: E402
from tests.hf_fixtures import Case, routing_gap, write_as  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 32,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
SMALL_EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

Maker = Callable[[Path, Case], Path]


def qwen(case: Case) -> Case:
    text = case.text | {"rope_parameters": ROPE}
    return replace(case, text=(text | SMALL) if "odd" not in case.name else SMALL | text)


def qwen_moe(case: Case) -> Case:
    return replace(case, text=qwen(case).text | SMALL_EXPERTS)


def olmo(case: Case) -> Case:
    return replace(case, text=case.text | {"hidden_size": 36, "intermediate_size": 48})


def picked(cases: tuple[Case, ...], names: str, shrink: Callable[[Case], Case]) -> list[Case]:
    return [shrink(case) for case in cases if case.name in names.split()]


# Hub layouts where save_pretrained writes another one.
FAMILIES: dict[str, tuple[Maker, str | None, list[Case]]] = {
    "qwen3_5": (
        hf_fixtures.make_checkpoint,
        None,
        picked(hf_fixtures.CASES, "text_tied vl_untied text_odd_sizes", qwen),
    ),
    "qwen3_next": (
        qwen_moe_fixtures.make_checkpoint,
        None,
        picked(qwen_moe_fixtures.CASES, "next_some_dense", qwen_moe),
    ),
    "qwen3_5_moe": (
        qwen_moe_fixtures.make_checkpoint,
        "fused",
        picked(qwen_moe_fixtures.CASES, "moe_text", qwen_moe),
    ),
    "olmo_hybrid": (
        olmo_fixtures.make_checkpoint,
        "hub",
        picked(olmo_fixtures.CASES, "olmo", olmo),
    ),
}
LAYOUTS = {"fused": qwen_moe_fixtures.layouts, "hub": olmo_fixtures.layouts}


def make(family: str, case: Case, maker: Maker, layout: str | None) -> None:
    folder = HERE / family / case.name
    shutil.rmtree(folder, ignore_errors=True)
    maker(folder, case)
    if layout is not None:
        rewritten = write_as(folder.with_suffix(".new"), LAYOUTS[layout](folder)[layout], folder)
        shutil.rmtree(folder)
        rewritten.rename(folder)
    vocab = model_config(read_hf_config(folder)).vocab_size
    tokens = write_expected(folder, vocab, case.seed)
    gap = routing_gap(folder, tokens[None])
    assert gap > 1e-4, f"{case.name}: a choice of experts is too close to call ({gap}); reseed"


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        maker, layout, cases = FAMILIES[name]
        for number, case in enumerate(cases):
            # bfloat16 halves the files, and everything is computed in float32 all the same
            make(name, replace(case, dtype="bfloat16", seed=number), maker, layout)
