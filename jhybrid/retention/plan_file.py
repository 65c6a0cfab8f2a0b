"""A plan beside converted weights: which units are kept, and the decay parameters it was made from.

Horizons are not stored: they follow from the weights, which must be the same ones.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig, require
from ..models.specs import ModelParams
from .horizon import EPSILON, static_horizons
from .selection import RetentionPlan, select

FORMAT_VERSION = 1


def plan_path(folder: str | Path, w_max: int) -> Path:
    """Where the plan of a cutoff lies in a model's folder."""
    return Path(folder) / f"retention-{w_max}.npz"


def save_plan(plan: RetentionPlan, path: Path) -> None:
    about = {
        "format_version": FORMAT_VERSION,
        "rule": plan.rule,
        "w_max": plan.w_max,
        "a_s": plan.horizons.gate_input,
        "epsilon": plan.horizons.epsilon,
        "weights": plan.horizons.digest,
    }
    np.savez_compressed(path, keep=plan.keep, about=np.array(json.dumps(about)))


def load_plan(
    path: Path, params: ModelParams | Mapping[str, Any], config: ModelConfig
) -> RetentionPlan:
    """The plan in `path`, which must have been made from the decay parameters in `params`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            keep, about = file["keep"], json.loads(str(file["about"]))
        version, weights = about["format_version"], about["weights"]
        rule, w_max, a_s, epsilon = (about[f] for f in ("rule", "w_max", "a_s", "epsilon"))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a retention plan ({error!r})") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: expected format_version {FORMAT_VERSION}, found {version!r}")
    horizons = static_horizons(params, config, gate_input=a_s, epsilon=epsilon)
    if weights != horizons.digest:
        raise ValueError(
            f"{path}: made from other weights: expected decay parameters of {horizons.digest}, "
            f"found {weights}; make it again with python -m jhybrid.plan --save"
        )
    if keep.shape != horizons.values.shape or keep.dtype != np.bool_:
        raise ValueError(
            f"{path}: expected a mask of {horizons.values.shape}, found {keep.dtype} {keep.shape}"
        )
    return RetentionPlan(keep, horizons, w_max, rule)


def stored_or_selected(
    folder: str | Path | None,
    params: ModelParams | Mapping[str, Any],
    config: ModelConfig,
    w_max: int,
    gate_input: float | None = None,
) -> RetentionPlan:
    """The plan stored in a model's folder for this cutoff, or else the one that weights give.

    A stored plan says which a_s it was made with; a different `gate_input` is a ValueError.
    """
    path = None if folder is None else plan_path(folder, w_max)
    if path is None or not path.exists():
        horizons = static_horizons(params, config, gate_input=gate_input, epsilon=EPSILON)
        return select(horizons, w_max)
    plan = load_plan(path, params, config)
    same = gate_input is None or gate_input == plan.horizons.gate_input
    require(same, "a_s", gate_input, f"{plan.horizons.gate_input}, that of {path}")
    require(plan.w_max == w_max, "w_max", plan.w_max, f"{w_max} in {path}")
    return plan
