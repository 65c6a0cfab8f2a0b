"""jhybrid: serve hybrid linear-attention language models from JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import ModelConfig
from .engine.config import EngineConfig
from .engine.request import PrefixCacheOptions, SamplingParams

if TYPE_CHECKING:
    from .engine.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "ModelConfig", "PrefixCacheOptions", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # loads JAX: only for those who ask
        from .engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
