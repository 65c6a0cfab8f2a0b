"""Engines of both kinds whose checkpoints keep a part, and what a hit restores in them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jhybrid.config import LinearAttentionConfig, ModelConfig
from jhybrid.engine.engine import Engine
from jhybrid.engine.request import PrefixCacheOptions
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.selection import RetentionPlan, empty_plan, full_plan, select

from .tiny import TINY, assert_idle, request, run, tiny_engine, tiny_params

KDA = LinearAttentionConfig(
    "kda", key_heads=4, value_heads=4, key_dim=8, value_dim=16, low_rank=4, gate_low_rank=4
)
MODELS: dict[str, ModelConfig] = {
    "gdn": TINY,
    "kda": ModelConfig(
        family="test",
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        layers=TINY.layers,
        linear=KDA,
        full=TINY.full,
        mlp_width=TINY.mlp_width,
        tie_embeddings=True,
        max_context=TINY.max_context,
    ),
}
W_MAX = {"gdn": 32, "kda": 64}  # keeps some of each layer
RNG = np.random.default_rng(0)
PROMPT = [int(t) for t in RNG.integers(0, 256, 75)]
SUFFIX = [int(t) for t in RNG.integers(0, 256, 6)]


@functools.cache
def plan_of(kind: str, name: str) -> RetentionPlan:
    model = MODELS[kind]
    horizons = static_horizons(tiny_params(model), model)
    plan = {"full": full_plan, "empty": empty_plan, "some": select}[name](horizons, W_MAX[kind])
    if name == "some":
        assert 0.2 < plan.kept_fraction < 0.95
    return plan


@functools.cache
def engine_for(kind: str, name: str, **flags: Any) -> Engine:
    """`dense` has no compressed pool; the others are servers with that plan."""
    sizes: Any = {"pages": 60, "slots": 12, "compressed_slots": 12, "max_running": 2}
    if name == "dense":
        return tiny_engine(MODELS[kind], **sizes, **flags)
    recovery = flags.pop("recovery", "dasc-nr")
    plan = plan_of(kind, name)
    flags = {"recovery": recovery, "w_max": W_MAX[kind], "group_inputs": "all", **flags}
    return tiny_engine(MODELS[kind], **sizes, plan=plan, **flags)


@dataclass
class State:
    recurrent: np.ndarray  # [Ll, H, K, V]
    conv: np.ndarray  # [Ll, W, C]


def state_in(engine: Engine, slot: int) -> State:
    caches = engine.runner.caches
    return State(np.asarray(caches.recurrent[slot]), np.asarray(caches.conv[slot]))


@functools.cache
def dense_state(kind: str) -> State:
    """The state after PROMPT, as a server without compression keeps it."""
    engine = engine_for(kind, "dense")
    prime(engine)
    found = engine.cache.pools.tree.match(PROMPT, len(PROMPT)).checkpoint_node
    assert found is not None and found.checkpoint is not None and found.end == len(PROMPT)
    return state_in(engine, found.checkpoint.slot)


@functools.cache
def dense_tokens(kind: str) -> list[int]:
    engine = engine_for(kind, "dense")
    prime(engine)
    return run(engine, [request("hit", PROMPT + SUFFIX, max_tokens=8)])["hit"].token_ids


def prime(engine: Engine) -> None:
    """The first sighting of PROMPT; leaves its state at the end of it, wherever there is room."""
    assert engine.flush_cache()
    run(engine, [request("prime", PROMPT, max_tokens=1)])
    assert_idle(engine)


@dataclass
class Hit:
    state: State  # when the first new token runs
    usage: Any
    token_ids: list[int]


def hit(engine: Engine, recovery: Any, name: str = "hit") -> Hit:
    """PROMPT + SUFFIX on a primed server, and the state that the suffix starts from."""
    seen: list[State] = []
    prefill = engine.runner.prefill

    def spy(batch: Any, between: Any) -> Any:
        (sequence,) = engine.scheduler.running
        assert sequence.lease is not None
        if sequence.dispatched == len(PROMPT):
            seen.append(state_in(engine, sequence.lease.slot))
        return prefill(batch, between)

    engine.runner.prefill = spy  # type: ignore[method-assign]
    try:
        asked = PrefixCacheOptions(recovery)
        result = run(engine, [request(name, PROMPT + SUFFIX, max_tokens=8, prefix_cache=asked)])[
            name
        ]
    finally:
        del engine.runner.prefill
    assert_idle(engine)
    assert len(seen) == 1
    return Hit(seen[0], result.usage, result.token_ids)


def stored(engine: Engine) -> list[np.ndarray]:
    """Everything that a hit must leave alone: the compressed checkpoint of PROMPT, and its KV."""
    match = engine.cache.pools.tree.match(PROMPT, len(PROMPT))
    assert match.checkpoint_node is not None and match.checkpoint_node.checkpoint is not None
    checkpoint = match.checkpoint_node.checkpoint
    assert (checkpoint.representation, checkpoint.depth) == ("compressed", len(PROMPT))
    pool, caches = engine.runner.compressed, engine.runner.caches
    assert pool is not None and caches.values is not None
    arrays = [pool.states.values, pool.conv]
    arrays += [] if pool.states.scales is None else [pool.states.scales]
    kv = [caches.keys, caches.values]
    rows = match.pages[: len(PROMPT) // engine.config.page_size]
    return [np.asarray(x[checkpoint.slot]) for x in arrays] + [np.asarray(x)[rows] for x in kv]
