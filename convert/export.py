"""Writing parameters in the published layout, for a model that was trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jhybrid.hf_config import HfConfig, model_config
from jhybrid.models.specs import ModelParams, model_specs
from jhybrid.weights import named

from . import mapping
from .checkpoint import SINGLE
from .families import family_of


def export_hf(params: ModelParams, hf_config: HfConfig, folder: str | Path) -> None:
    """Write `config.json` and one safetensors file that transformers and `convert` read.

    Parameters keep their dtypes, so that converting gives them back bit for bit (a zero-centred
    norm only where its multiplier lies in [0.5, 2], where subtracting one is exact).
    """
    config = model_config(hf_config)
    table = family_of(hf_config)(config, ())
    values = named(params)
    expected = {name: spec.shape for name, spec in named(model_specs(config)).items()}
    found = {name: value.shape for name, value in values.items()}
    if expected != found:
        different = sorted(n for n in expected | found if expected.get(n) != found.get(n))
        raise ValueError(f"params: expected those of this config, but these differ: {different}")
    tensors: dict[str, Any] = {}
    for rule in table.rules:
        tensors |= mapping.invert(rule, np.asarray(values[rule.target]))
    for name, original in table.copies:
        tensors[name] = tensors[original].copy()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n")
