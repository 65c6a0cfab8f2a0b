"""How an arm's state comes about at the end of a cached prefix: what is replayed, what restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool

from jhybrid.engine.recovery import replay_length
from jhybrid.retention.horizon import Horizons
from jhybrid.retention.selection import select

from ..arms import EXACT, MASKED, ZEROED, Arm
from ..interventions import control_plan


@dataclass(frozen=True, eq=False)
class Recipe:
    """First the last tokens of the prefix run from zeros: through the whole `model`, or each
    group's cached `inputs` through its own linear layers; `window` tokens, or a `ratio` of the
    prefix. Then `rows` of the checkpoint are restored, and its conv windows (None: nothing is).
    `kv` says what the suffix finds of the prefix's keys and values.
    """

    replay: Literal["model", "inputs"] | None = None
    window: int = 0
    ratio: float = 0.0
    rows: Bool[np.ndarray, "Ll H K"] | None = None
    int8: bool = False
    kv: Literal["kept", "zeros", "masked"] = "kept"

    def replayed(self, prefix: int) -> int:
        """How many tokens of a prefix are replayed."""
        if self.replay is None:
            return 0
        return max(min(self.window, prefix), replay_length(self.ratio, prefix))


def recipe(arm: Arm, horizons: Horizons) -> Recipe:
    """Of an arm whose checkpoint lies at the end of the prefix, where every group input is kept."""
    plan = control_plan(horizons, "full/4")
    if arm.name in EXACT or arm.name == "anchored":
        return Recipe(rows=plan.row_mask)
    if arm.name in (*ZEROED, *MASKED):
        kind, _, part = arm.name.partition("-")
        kv = "kept" if part == "linear" else ("zeros" if kind == "zero" else "masked")
        return Recipe(rows=plan.row_mask if part == "full-kv" else None, kv=kv)
    if arm.intervention is not None:
        return Recipe(rows=control_plan(horizons, arm.intervention).row_mask)
    match arm.recovery:
        case "zero":
            return Recipe()
        case "off":
            return Recipe("model", ratio=1.0)
        case "tail-replay":
            assert arm.replay_ratio is not None
            return Recipe("inputs", ratio=arm.replay_ratio)
        case _:
            plan = select(horizons, arm.flags["w_max"])
            through = {"dasc-wr": "model", "anchored": "inputs"}
            return Recipe(
                through.get(arm.recovery),  # pyright: ignore[reportArgumentType]
                window=plan.replay_window,
                rows=plan.row_mask,
                int8=arm.flags.get("checkpoint_dtype") == "int8",
            )
