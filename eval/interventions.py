"""Changes of a filled cache between the request that fills it and those that reuse it.

    zero-full-kv   keys and values of the full-attention layers are zeros: a zeroed key still has
                   a logit, 0, and its share of the softmax
    zero-linear    recurrent states and conv windows of the checkpoints are zeros
    zero-both      both
    a mask         rows of omitted units are zeros, conv windows stay (dasc-nr for any mask)

Each is a jitted function of the caches, applied to all of them while nothing runs: after a flush
and the warm requests they hold nothing else than the prefixes under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jhybrid.batch import Caches
from jhybrid.config import require
from jhybrid.engine.engine import Engine
from jhybrid.retention.horizon import Horizons, static_horizons
from jhybrid.retention.selection import (
    RetentionPlan,
    empty_plan,
    full_plan,
    inverse_plan,
    random_plan,
    select,
)

from .arms import MASKED, ZEROED


def zero_full_kv(caches: Caches) -> Caches:
    values = None if caches.values is None else jnp.zeros_like(caches.values)
    return replace(caches, keys=jnp.zeros_like(caches.keys), values=values)


def zero_linear(caches: Caches) -> Caches:
    recurrent, conv = jnp.zeros_like(caches.recurrent), jnp.zeros_like(caches.conv)
    return replace(caches, recurrent=recurrent, conv=conv)


def mask_states(caches: Caches, rows: Bool[np.ndarray, "Ll H K"]) -> Caches:
    """States keep the rows where `rows` is true."""
    recurrent = jnp.where(rows[..., None], caches.recurrent, 0)
    return replace(caches, recurrent=recurrent)


def intervention(engine: Engine, name: str) -> Callable[[], None]:
    """The intervention of an arm's name, to be applied to the caches while the engine is idle.

    Compiled once, however many blocks it is applied to.
    """
    require(name not in MASKED, "arm", name, "an arm that an engine has (see eval/arms.py)")
    runner = engine.runner
    shardings = jax.tree.map(lambda x: x.sharding, runner.caches)
    if name in ZEROED:
        extra, change = (), _ZEROING[name]
    else:
        plan = control_plan(static_horizons(runner.params, runner.config), name)
        extra, change = (plan.row_mask,), mask_states
    jitted = jax.jit(change, donate_argnums=0, out_shardings=shardings)

    def apply() -> None:
        require(not engine.has_work(), "engine", "running", "idle while its cache is changed")
        runner.caches = jitted(runner.caches, *extra)

    return apply


_ZEROING: dict[str, Callable[..., Caches]] = {
    "zero-full-kv": zero_full_kv,
    "zero-linear": zero_linear,
    "zero-both": lambda caches: zero_full_kv(zero_linear(caches)),
}


def control_plan(horizons: Horizons, name: str) -> RetentionPlan:
    """`random-SEED/W`, `inverse/W`, `full/W`, `empty/W` or `horizon/W`."""
    kind, _, window = name.partition("/")
    w_max = int(window)
    if kind.startswith("random-"):
        return random_plan(horizons, w_max, int(kind.removeprefix("random-")))
    plans = {"inverse": inverse_plan, "full": full_plan, "empty": empty_plan, "horizon": select}
    return plans[kind](horizons, w_max)
