"""Checkpoints into the compressed pool and back, over 1 to 8 ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jhybrid.batch import Caches
from jhybrid.config import ModelConfig
from jhybrid.models.specs import cache_partition
from jhybrid.params import map_specs, partition_specs
from jhybrid.retention.layout import kept_per_rank, make_layout
from jhybrid.retention.maps import Exchange, MoveMaps
from jhybrid.retention.movers import CompressedPool, compressed_specs, load, scratch_bytes, store
from jhybrid.retention.placement import PLACEMENTS, PlacementKind, balance_storage
from jhybrid.retention.prepare import prepare
from jhybrid.retention.ratios import CheckpointDtype
from jhybrid.retention.selection import RetentionPlan, empty_plan, full_plan, select
from jhybrid.sharding import AXIS, REPLICATED, make_mesh, sharded
from pallas_kernels.triton import Implementation
from tests.kernels.lowering import TRITON_CALL

from .plans import KINDS, plans, tiny_horizons, tiny_model

NATIVE, COMPRESSED = 6, 5
MODELS = {kind: tiny_model(kind) for kind in KINDS}


class Pools:
    """Native and compressed pools of random contents, moved by jitted functions."""

    def __init__(self, config: ModelConfig, maps: MoveMaps, dtype: CheckpointDtype) -> None:
        tp = len(maps.rows)
        self.maps = maps
        self._move = _movers(config, make_mesh(tp), dtype, maps.exchange is not None)
        rng = np.random.default_rng(0)
        rows = (NATIVE, 3, config.linear.value_heads, config.linear.key_dim, 6)
        channels = config.linear.key_heads * config.linear.conv_width
        self.recurrent: Any = rng.standard_normal(rows).astype(np.float32)
        self.conv: Any = rng.standard_normal((NATIVE, 3, 3, channels)).astype(np.float32)
        nothing: Any = None
        self.caches: Any = Caches(nothing, nothing, self.recurrent, self.conv)
        specs = compressed_specs(config, maps, COMPRESSED, dtype)
        # what an earlier checkpoint left there must not show
        self.pool: Any = map_specs(
            lambda s: rng.integers(-100, 100, s.shape).astype(s.dtype_in("float32")), specs
        )

    def store(self, source: list[int], target: list[int]) -> CompressedPool:
        pairs = (np.array(x, np.int32) for x in (source, target))
        self.pool = self._move["store"](self.caches, self.pool, self.maps, *pairs)
        return self.pool

    def load(self, source: list[int], target: list[int], omitted: str = "zero") -> np.ndarray:
        pairs = (np.array(x, np.int32) for x in (source, target))
        self.caches = self._move[omitted](self.caches, self.pool, self.maps, *pairs)
        return np.asarray(self.caches.recurrent)


@functools.cache
def _movers(
    config: ModelConfig,
    mesh: Mesh,
    dtype: CheckpointDtype,
    remote: bool,
    implementation: Implementation | None = None,
) -> Any:
    by_rank = PartitionSpec(AXIS)
    exchange = Exchange(by_rank, by_rank) if remote else None
    maps = MoveMaps(by_rank, by_rank, exchange)
    nothing: Any = None
    caches = replace(cache_partition(config), keys=nothing, values=nothing)
    one: Any = np.zeros((mesh.size, 1), np.int32)
    pool = partition_specs(compressed_specs(config, MoveMaps(one, one, None), 1, dtype))
    use: Any = {"implementation": implementation}
    moves: dict[str, Any] = {
        "store": (functools.partial(store, **use), (caches, pool, maps), pool),
        "zero": (functools.partial(load, omitted="zero", **use), (caches, pool, maps), caches),
        "keep": (functools.partial(load, omitted="keep", **use), (caches, pool, maps), caches),
    }
    return {
        name: jax.jit(sharded(fn, mesh, (*args, REPLICATED, REPLICATED), out))
        for name, (fn, args, out) in moves.items()
    }


def widened(maps: MoveMaps) -> MoveMaps:
    """The same maps padded as wide as any plan's, so that one compiled mover serves them all."""
    tp, most = maps.positions.shape

    def pad(x: np.ndarray, width: int) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1)

    def blocks(x: np.ndarray) -> np.ndarray:
        return pad(x.reshape(tp * tp, -1), most).reshape(tp, -1)

    nothing = np.full((tp, tp * most), -1, np.int32)
    exchange = Exchange(nothing, nothing)
    if maps.exchange is not None:
        exchange = Exchange(blocks(maps.exchange.send), blocks(maps.exchange.receive))
    return MoveMaps(pad(maps.rows, most), maps.positions, exchange)


def assert_restored(plan: RetentionPlan, pools: Pools, dtype: CheckpointDtype) -> None:
    before, conv = pools.recurrent, pools.conv
    kept = plan.row_mask[..., None]
    old = jax.tree.map(np.asarray, pools.pool)
    new = jax.tree.map(np.asarray, pools.store([1, -1, 4, 2], [3, 2, 0, -1]))
    for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(x[[1, 2, 4]], y[[1, 2, 4]])  # slots not stored to
    after = pools.load([0, 3, -1, 1], [5, 0, 3, -1])
    after_conv = np.asarray(pools.caches.conv)
    np.testing.assert_array_equal(after[1:5], before[1:5])
    for target, source in ((5, 4), (0, 1)):
        np.testing.assert_array_equal(after_conv[target], conv[source])
        expected = np.where(kept, before[source], 0)
        if dtype == "float32":
            np.testing.assert_array_equal(after[target], expected)
        else:
            step = np.abs(expected).max(axis=-1, keepdims=True) / 127
            assert (np.abs(after[target] - expected) <= step * (0.5 + 1e-5)).all()
            assert not after[target][~plan.row_mask].any()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_checkpoint_comes_back(tp: int, dtype: CheckpointDtype) -> None:
    """Kept units exactly (int8: within half a step), the rest zero, whatever the plan."""

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        config = MODELS[data.draw(st.sampled_from(KINDS))]
        plan = data.draw(plans(config))
        placement = data.draw(st.sampled_from(PLACEMENTS))
        kinds: tuple[Literal["ragged", "padded"], ...] = ("ragged", "padded")
        layout = data.draw(st.sampled_from(kinds)) if placement == "off" else "ragged"
        made = prepare(plan, config, tp, layout=layout, placement=placement)
        assert_restored(made.plan, Pools(config, widened(made.maps), dtype), dtype)

    check()


@pytest.mark.parametrize("make", [full_plan, empty_plan, select])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_as_they_are(kind: str, make: Any) -> None:
    """No padding: a slot of no rows, of all rows, of some."""
    config = MODELS[kind]
    plan = make(tiny_horizons(config), 16)
    for dtype in ("float32", "int8"):
        made = prepare(plan, config, 2, placement="storage")
        assert_restored(made.plan, Pools(config, made.maps, dtype), dtype)


def test_padded_and_ragged_restore_the_same() -> None:
    config = MODELS["kda"]
    plan = select(tiny_horizons(config), 64)
    states = []
    for layout in ("ragged", "padded"):
        pools = Pools(config, prepare(plan, config, 4, layout=layout).maps, "int8")
        pools.store([0, 1, 2, 3], [0, 1, 2, 3])
        states.append(pools.load([3, 2, 1, 0], [0, 1, 2, 3]))
    np.testing.assert_array_equal(*states)
    padded = make_layout(plan, 4, "padded").slot_rows
    assert padded > make_layout(plan, 4, "ragged").slot_rows


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_load_may_keep_what_it_omits(kind: str, placement: PlacementKind) -> None:
    """As a refresh ends: kept units of the checkpoint over what has been replayed."""
    config = MODELS[kind]
    made = prepare(select(tiny_horizons(config), 32), config, 4, placement=placement)
    pools = Pools(config, made.maps, "float32")
    before, kept = pools.recurrent, made.plan.row_mask[..., None]
    pools.store([0, 1], [4, 1])
    after = pools.load([4, 1], [2, 3], omitted="keep")
    np.testing.assert_array_equal(after[2], np.where(kept, before[0], before[2]))
    np.testing.assert_array_equal(after[3], np.where(kept, before[1], before[3]))


def test_nothing_remote_no_collective() -> None:
    config = MODELS["kda"]
    even = prepare(full_plan(tiny_horizons(config), 16), config, 4, placement="storage")
    uneven = prepare(select(tiny_horizons(config), 64), config, 4, placement="storage")
    assert even.maps.exchange is None and uneven.maps.exchange is not None
    assert scratch_bytes(config, even.maps, 8, "int8") == 0
    remote = balance_storage(kept_per_rank(uneven.plan, 4)).remote * uneven.plan.horizons.rows
    least = 2 * 8 * remote * (config.linear.value_dim + 4)  # each row once, without the padding
    assert least <= scratch_bytes(config, uneven.maps, 8, "int8") <= 16 * least
    texts = []
    for made in (even, uneven):
        pools = Pools(config, made.maps, "float32")
        pairs = (jnp.zeros(2, jnp.int32),) * 2
        lowered = pools._move["store"].lower(pools.caches, pools.pool, made.maps, *pairs)
        texts.append(lowered.as_text())
    assert "all_to_all" not in texts[0] and "all_to_all" in texts[1]


def test_kernels_lower_for_cuda() -> None:
    """Under shard_map too: one launch each, and one more for what is remote."""
    config = MODELS["kda"]
    made = prepare(select(tiny_horizons(config), 64), config, 4, placement="storage")
    pools = Pools(config, made.maps, "int8")
    pairs = (np.zeros(4, np.int32),) * 2
    args = (pools.caches, pools.pool, made.maps, *pairs)
    moves = _movers(config, make_mesh(4), "int8", True, "pallas")
    for name in ("store", "zero", "keep"):
        lowered = moves[name].trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count(TRITON_CALL) == 2, name
