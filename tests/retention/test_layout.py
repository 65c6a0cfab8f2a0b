"""Offsets and rows of both layouts, and the ratios that the paper prints."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhybrid import horizons as published
from jhybrid.models.specs import model_specs
from jhybrid.params import init_params
from jhybrid.presets import preset
from jhybrid.retention.horizon import Horizons, decay_names, static_horizons
from jhybrid.retention.layout import kept_per_rank, make_layout
from jhybrid.retention.prepare import prepare
from jhybrid.retention.ratios import dense_bytes, plan_ratios, slot_bytes
from jhybrid.retention.selection import RetentionPlan, empty_plan, full_plan, select
from jhybrid.sharding import make_mesh
from jhybrid.weights import named

from .plans import KINDS, plans, tiny_horizons, tiny_model

MODELS = {kind: tiny_model(kind) for kind in KINDS}
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@EXAMPLES
@given(st.data())
def test_rows_are_the_kept_rows_of_each_rank(data: st.DataObject) -> None:
    plan = data.draw(plans(MODELS[data.draw(st.sampled_from(KINDS))]))
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    kinds: list[Literal["ragged", "padded"]] = ["ragged", "padded"]
    layout = make_layout(plan, tp, data.draw(st.sampled_from(kinds)))
    layers, heads, _ = plan.row_mask.shape
    for rank in range(tp):
        mine = plan.row_mask[:, rank * heads // tp : (rank + 1) * heads // tp]
        rows = layout.rows[rank]
        assert rows[rows >= 0].tolist() == np.flatnonzero(mine).tolist()
        for layer in range(layers):  # layer l occupies [o_l, o_l+1)
            first, last = layout.offsets[rank, layer : layer + 2] * layout.unit_rows
            here = rows[first:last]
            assert (here[here >= 0] // mine[0].size == layer).all()
            assert (here >= 0).sum() == mine[layer].sum()
            assert (here[: mine[layer].sum()] >= 0).all()  # padding is behind
    units = plan.kept_per_layer
    if tp == 1:
        expected = units.sum() if layout.kind == "ragged" else len(units) * units.max()
        assert layout.slot_rows == expected * layout.unit_rows


def test_ranks_share_one_width() -> None:
    plan = select(tiny_horizons(MODELS["kda"]), 64)
    layout = make_layout(plan, 4)
    counts = kept_per_rank(plan, 4)
    assert layout.units.shape == (4, counts.max())
    np.testing.assert_array_equal((layout.units >= 0).sum(axis=1), counts)


def kept_share(fraction: float, config_name: str, channels: int = 128) -> RetentionPlan:
    """A plan of a preset's shapes that keeps `fraction` of every layer's units."""
    config = preset(config_name)
    shape = (len(config.linear_layers), config.linear.value_heads, channels)
    units = np.arange(shape[1] * shape[2]).reshape(1, *shape[1:]) < fraction * shape[1] * shape[2]
    keep = np.broadcast_to(units, shape)
    return RetentionPlan(keep, Horizons(np.ones(shape), 1, -0.3, 1e-3, ""), 16, "test")


def test_kimi_linear_at_its_published_operating_point() -> None:
    """Section 5.3 and table 3: 2.64x, with int8 8.11x; int8 alone 3.88x over temporal state."""
    found = plan_ratios(kept_share(0.357, "kimi-linear-48b"), preset("kimi-linear-48b"), 8)
    assert abs(found.kept / found.units - 0.357) < 2e-4
    assert abs(found.checkpoint_ragged - 2.64) < 0.005
    assert abs(found.checkpoint_int8 - 8.11) < 0.05
    assert abs(found.int8_alone_temporal - 3.88) < 0.005
    assert found.temporal_ragged == found.units / found.kept


@pytest.mark.parametrize(
    ("name", "capacities", "layers"),
    [
        ("kimi-linear-48b", published.KIMI_LINEAR_CAPACITY, 20),
        ("qwen3-next-80b", published.QWEN3_NEXT_CAPACITY, 36),
        ("kimi-k3-slice", published.KIMI_K3_CAPACITY, 12),
    ],
)
def test_presets_reach_the_published_capacities(
    name: str, capacities: dict[int, float], layers: int
) -> None:
    config = preset(name)
    assert len(config.linear_layers) == layers
    specs = {n: named(model_specs(config))[n] for n in decay_names(config)}
    found = static_horizons(
        init_params(specs, jax.random.key(0), jnp.bfloat16, make_mesh(1)), config
    )
    for w_max, capacity in capacities.items():
        ratios = plan_ratios(select(found, w_max), config, 8)
        off, storage, hybrid = ratios.placements
        assert abs(ratios.checkpoint_ragged / capacity - 1) < 0.03
        assert ratios.checkpoint_padded < ratios.checkpoint_ragged
        assert off.capacity < storage.capacity <= ratios.checkpoint_ragged
        assert hybrid.capacity == storage.capacity  # both allocate ceil(N / P)
        assert max(hybrid.rank_units) <= max(off.rank_units)
        assert hybrid.remote_units <= storage.remote_units


def test_ratios_by_hand() -> None:
    """Two of three layers keep half, the third a quarter, of 16 heads [4, 6] in float32."""
    config = MODELS["gdn"]
    horizons = tiny_horizons(config)
    keep = np.zeros((3, 16, 1), np.bool_)
    keep[0, :8], keep[1, 8:], keep[2, :4] = True, True, True
    found = plan_ratios(RetentionPlan(keep, horizons, 16, "test"), config, tp=2)
    conv = 3 * 3 * 8 * (2 * 4 + 2 * 6) * 2
    dense = 48 * 4 * 6 * 4
    assert (found.units, found.kept, found.largest_layer) == (48, 20, 8)
    assert found.temporal_ragged == 48 / 20
    assert found.temporal_padded == 48 / 24
    assert math.isclose(found.layout_gain, found.temporal_ragged / found.temporal_padded)
    assert found.checkpoint_ragged == (dense + conv) / (20 * 96 + conv)
    assert found.checkpoint_padded == (dense + conv) / (24 * 96 + conv)
    assert found.checkpoint_int8 == (dense + conv) / (20 * 4 * 10 + conv)
    assert found.int8_alone_temporal == 24 / 10
    off, storage, hybrid = found.placements
    assert (off.rank_units, off.slot_units, off.remote_units) == ((12, 8), 12, 0)
    assert off.capacity == (dense + conv) / (2 * 12 * 96 + conv)
    assert (storage.slot_units, storage.remote_units) == (10, 2)
    assert (hybrid.rank_units, hybrid.remote_units) == ((10, 10), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str) -> None:
    config, horizons = MODELS[kind], tiny_horizons(MODELS[kind])
    full = plan_ratios(full_plan(horizons, 16), config, 4)
    assert full.temporal_ragged == full.checkpoint_ragged == full.layout_gain == 1
    assert {p.capacity for p in full.placements} == {1.0}
    empty = plan_ratios(empty_plan(horizons, 16), config, 4)
    assert empty.temporal_ragged == math.inf and empty.layout_gain == 1
    dense = dense_bytes(config)
    assert empty.checkpoint_ragged == dense.total / dense.conv


def test_slot_bytes_are_those_of_the_layout() -> None:
    config = MODELS["kda"]
    plan = select(tiny_horizons(config), 64)
    made = prepare(plan, config, 4, placement="storage")
    placed = plan_ratios(plan, config, 4).placements[1]
    assert made.slot_rows == placed.slot_units
    total = slot_bytes(config, made.slot_rows, 4, "int8", 2).total
    assert dense_bytes(config).total / total == placed.capacity_int8


def test_bad_placements_are_refused() -> None:
    config = MODELS["gdn"]
    plan = select(tiny_horizons(config), 16)
    with pytest.raises(ValueError, match="layout: expected ragged for storage, got 'padded'"):
        prepare(plan, config, 2, layout="padded", placement="storage")
    with pytest.raises(ValueError, match="placement: expected one of off, storage, hybrid"):
        prepare(plan, config, 2, placement="remote")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tp: expected a divisor of the 16 value heads, got 3"):
        prepare(plan, config, 3)
    with pytest.raises(ValueError, match="layout: expected ragged or padded"):
        make_layout(replace(plan), 1, "dense")  # type: ignore[arg-type]
