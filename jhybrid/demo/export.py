"""The trained model as a Hugging Face folder: `Qwen3_5ForCausalLM`, loadable by transformers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..config import ModelConfig
from ..convert.checkpoint import SINGLE
from ..convert.export import export_hf
from ..hf_config import model_config
from ..models.specs import ModelParams
from .model import cast


def write_model(
    folder: Path, params: ModelParams, hf_config: dict[str, Any], dtype: Any = jnp.bfloat16
) -> None:
    """config.json and model.safetensors: matrices in `dtype`, gates and norms in float32.

    The weights are replaced as a whole: a kill leaves the old or the new ones.
    """
    with tempfile.TemporaryDirectory() as staging:
        export_hf(cast(params, model_config(hf_config), dtype), hf_config, staging)
        shutil.copyfile(Path(staging) / "config.json", folder / "config.json")
        shutil.copyfile(Path(staging) / SINGLE, folder / f"{SINGLE}.tmp")
    os.replace(folder / f"{SINGLE}.tmp", folder / SINGLE)


def rounded(params: ModelParams, config: ModelConfig) -> ModelParams:
    """Float32 parameters with the values that the bfloat16 file holds."""
    return cast(cast(params, config, jnp.bfloat16), config, jnp.float32)
