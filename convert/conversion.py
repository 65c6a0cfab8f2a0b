"""One checkpoint folder, checked and ready to be converted parameter by parameter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jhybrid.config import ModelConfig
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.models.specs import model_specs
from jhybrid.params import ParamSpec
from jhybrid.weights import named

from . import mapping
from .checkpoint import CheckpointReader
from .families import family_of


@dataclass(frozen=True)
class Conversion:
    """Rules that are known to fit; `parameter` reads and transforms one at a time."""

    folder: Path
    config: ModelConfig
    specs: dict[str, ParamSpec]
    rules: dict[str, mapping.Rule]
    reader: CheckpointReader
    dtype: Any

    def parameter(self, name: str) -> np.ndarray:
        return mapping.convert(self.rules[name], self.reader, self.specs[name], self.dtype)


def open_checkpoint(
    folder: str | Path, dtype: Any = None, config: ModelConfig | None = None
) -> Conversion:
    """Check a Hugging Face folder against its family's table. Reads headers, not data.

    `dtype` None is float32 for a checkpoint in float32, else bfloat16.
    """
    folder = Path(folder)
    hf_config = read_hf_config(folder)
    family = family_of(hf_config)
    config = config if config is not None else model_config(hf_config)
    reader = CheckpointReader(folder)
    table = family(config, reader.keys())
    specs = named(model_specs(config))
    mapping.check(table, reader, specs)
    mapping.check_copies(table, reader)
    rules = {rule.target: rule for rule in table.rules}
    if dtype is None:
        stored = reader[rules["embedding"].sources[0].name].dtype
        dtype = jnp.float32 if stored.itemsize >= 4 else jnp.bfloat16
    return Conversion(folder, config, specs, rules, reader, jnp.dtype(dtype))
