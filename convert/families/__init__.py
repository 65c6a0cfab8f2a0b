"""One table per published model family, found by the outer `model_type` of its config."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jhybrid.config import ModelConfig, require
from jhybrid.hf_config import HfConfig

from ..mapping import Table
from . import kimi, olmo, qwen

# A family sees the tensor names because one model is published in several layouts; given no
# names it describes the layout that exports are written in.
Family = Callable[[ModelConfig, Collection[str]], Table]

FAMILIES: dict[str, Family] = {
    "kimi_k3": kimi.table,
    "kimi_linear": kimi.table,
    "olmo_hybrid": olmo.table,
    "qwen3_5": qwen.table,
    "qwen3_5_moe": qwen.table,
    "qwen3_5_moe_text": qwen.table,
    "qwen3_5_text": qwen.table,
    "qwen3_next": qwen.table,
}


def family_of(hf_config: HfConfig) -> Family:
    """The family of a parsed config.json. ValueError naming the ones there are."""
    kind = hf_config.get("model_type")
    require(str(kind) in FAMILIES, "model_type", kind, f"one of {sorted(FAMILIES)}")
    return FAMILIES[str(kind)]
