"""Group inputs and their replay, against the states that a cold prefill leaves."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jhybrid.batch import Caches, DecodeBatch, PrefillBatch, ReplayBatch
from jhybrid.config import LayerConfig, ModelConfig
from jhybrid.engine.build import find_model
from jhybrid.hf_config import model_config
from jhybrid.models.groups import Group, groups, stored_inputs
from jhybrid.models.replay import replay
from jhybrid.models.specs import ModelParams, cache_partition, model_partition
from jhybrid.presets import PRESETS, preset
from jhybrid.sharding import make_mesh, sharded
from jhybrid.weights import load
from pallas_kernels import NO_SLOT, Segments
from tests.assertions import relative_rms
from tests.k3_fixtures import CONFIG as KIMI_K3
from tests.models.replay_bench import (
    COLD,
    OTHER,
    PAGE,
    TOKENS,
    WARM,
    WIDTH,
    Model,
    assert_states,
    make_model,
    padded,
    prefill,
    random_tokens,
    replay_batch,
    scattered,
    step,
    whole_layers,
)

NAMES = (
    "qwen3_next-next_some_dense",
    "qwen3_5-text_odd_sizes",
    "olmo_hybrid-olmo",
    "kimi_linear-direct_query",
)
BOUND = 1e-5


def test_groups_of_irregular_stacks() -> None:
    def of(letters: str) -> tuple[Group, ...]:
        kinds = {"l": LayerConfig("linear"), "f": LayerConfig("full")}
        layers = tuple(kinds[letter] for letter in letters)
        return groups(ModelConfig(**{**vars(preset("qwen3.5-4b")), "layers": layers}))

    assert of("llfl") == (Group((0, 1), (0, 1), None), Group((3,), (2,), 0))
    assert of("flfflf") == (Group((1,), (0,), 0), Group((4,), (1,), 1))
    assert of("ff") == ()


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"kimi-k3-slice"}))
def test_groups_cover_the_linear_layers_of_published_models(name: str) -> None:
    config = preset(name)
    found = groups(config)
    assert tuple(n for group in found for n in group.layers) == config.linear_layers
    assert [n for group in found for n in group.linear] == list(range(len(config.linear_layers)))
    assert [group.stored for group in found] == [None, *range(len(found) - 1)]
    assert len(config.full_layers) - stored_inputs(config) == 1  # the last layer is a full one


def test_attention_residuals_have_no_group_inputs() -> None:
    with pytest.raises(ValueError, match="group inputs.*no attention residuals.*residual_block 3"):
        groups(model_config(KIMI_K3))


@pytest.mark.parametrize("name", NAMES)
def test_replay_of_everything_and_from_checkpoints_equals_a_cold_prefill(
    name: str, mesh: Mesh
) -> None:
    """r = 1, and anchored from a dense checkpoint at random depths; group 0 from its tokens."""
    model = make_model(name, mesh)
    tokens = random_tokens(model.config)
    rng = np.random.default_rng(1)
    for _ in range(4):
        c, m = sorted(int(n) for n in rng.choice(np.arange(1, TOKENS + 1), 2, replace=False))
        cold = prefill(model, tokens, [c, m], [OTHER, COLD])
        whole = step(model, cold, replay_batch(tokens, 0, m, NO_SLOT, WARM), model.groups)
        assert_states(whole, WARM, cold, COLD, BOUND)
        anchored = step(model, cold, replay_batch(tokens, c, m, OTHER, WARM), model.groups)
        assert_states(anchored, WARM, cold, COLD, BOUND)
        assert_states(anchored, OTHER, cold, OTHER, 0)  # the checkpoint is only read


def test_replay_cut_into_pieces_and_packed_with_another(mesh: Mesh) -> None:
    model = make_model("qwen3_5-text_odd_sizes", mesh)
    tokens = random_tokens(model.config)
    cold = prefill(model, tokens, [40, TOKENS], [OTHER, COLD])
    first = step(model, cold, replay_batch(tokens, 0, 33, NO_SLOT, WARM), model.groups)
    both = ReplayBatch(  # the rest of one, and the first 40 tokens for another slot
        token_ids=padded(np.concatenate([tokens[33:], tokens[:40]]), WIDTH, 0),
        input_slots=padded(scattered(np.r_[33:TOKENS, 0:40], WIDTH), WIDTH, -1),
        segments=Segments(
            jnp.array([0, TOKENS - 33, TOKENS + 7, TOKENS + 7], jnp.int32),
            jnp.array([WARM, NO_SLOT, NO_SLOT], jnp.int32),
            jnp.array([WARM, 3, NO_SLOT], jnp.int32),
        ),
    )
    second = step(model, first, both, model.groups)
    assert_states(second, WARM, cold, COLD, BOUND)
    assert_states(second, 3, cold, OTHER, BOUND)


@pytest.mark.parametrize("name", ["qwen3_next-next_some_dense", "kimi_linear-direct_query"])
def test_inputs_written_by_decoding_replay_too(name: str, mesh: Mesh) -> None:
    model = make_model(name, mesh)
    tokens, start = random_tokens(model.config), 60
    caches = prefill(model, tokens, [start], [COLD])
    table = np.random.default_rng(0).permutation(WIDTH // PAGE).astype(np.int32)
    for position in range(start, TOKENS):
        slot = scattered(np.array([position]), WIDTH)
        batch = DecodeBatch(
            token_ids=padded(tokens[position : position + 1], 2, 0),
            positions=padded(np.array([position]), 2, -1),
            kv_slots=padded(slot, 2, -1),
            page_table=jnp.asarray(np.stack([table, table])),
            state_slots=jnp.array([COLD, NO_SLOT], jnp.int32),
            input_slots=padded(slot, 2, -1),
        )
        caches = step(model, caches, batch)
    warm = step(model, caches, replay_batch(tokens, 0, TOKENS, NO_SLOT, WARM), model.groups)
    assert_states(warm, WARM, caches, COLD, BOUND)


def test_all_groups_at_once_equal_one_after_another(mesh: Mesh) -> None:
    for name in ("qwen3_next-next_some_dense", "kimi_linear-direct_query"):
        model = make_model(name, mesh)
        cold = prefill(model, random_tokens(model.config), [30, TOKENS], [OTHER, COLD])
        batch = replay_batch(random_tokens(model.config), 30, 70, OTHER, WARM)
        at_once, in_turn = step(model, cold, batch, model.groups), cold
        for group in model.groups:
            in_turn = step(model, in_turn, batch, (group,))
        assert_states(at_once, WARM, in_turn, WARM, 1e-6)


@pytest.mark.parametrize("name", ["qwen3_next-next_some_dense", "kimi_linear-direct_query"])
def test_the_skipped_tail_changes_no_state(name: str, mesh: Mesh) -> None:
    """Against whole layers, up to the order in which XLA sums over what it has fused."""
    model = make_model(name, mesh)
    tokens = random_tokens(model.config)
    cold = prefill(model, tokens, [30, TOKENS], [OTHER, COLD])
    batch = replay_batch(tokens, 30, 70, OTHER, WARM)
    as_layers = PrefillBatch(
        token_ids=batch.token_ids,
        positions=batch.token_ids,  # linear layers know none of these
        kv_slots=batch.token_ids,
        cu_seqlens=batch.segments.cu,
        page_table=jnp.zeros((1, 1), jnp.int32),
        segments=batch.segments,
        input_slots=batch.input_slots,
    )
    caches = cache_partition(model.config, group_inputs=True)
    ins = (model_partition(model.config), caches)

    def skipping(p: ModelParams, c: Caches) -> Caches:
        return replay(p, c, batch, model.config, model.groups)

    def whole(p: ModelParams, c: Caches) -> Caches:
        for group in model.groups:
            c = whole_layers(p, c, as_layers, model.config, group)
        return c

    found, expected = (
        jax.jit(sharded(fn, mesh, ins, caches))(model.params, cold) for fn in (skipping, whole)
    )
    assert_states(found, WARM, expected, WARM, 1e-6)
    np.testing.assert_array_equal(found.conv[WARM], expected.conv[WARM])


def test_over_ranks(mesh: Mesh) -> None:
    name = "olmo_hybrid-olmo"
    one, two = make_model(name, mesh), make_model(name, make_mesh(2))
    tokens = random_tokens(one.config)
    cold = prefill(one, tokens, [20, TOKENS], [OTHER, COLD])
    halves = prefill(two, tokens, [20, TOKENS], [OTHER, COLD])
    halves = step(two, halves, replay_batch(tokens, 20, TOKENS, OTHER, WARM), two.groups)
    assert_states(halves, WARM, cold, COLD, BOUND)


@pytest.fixture(scope="module")
def demo(mesh: Mesh) -> Model:
    found = find_model("demo")
    assert isinstance(found.folder, Path)
    return Model(load(found.folder, found.config, mesh, jnp.float32), found.config, mesh)


DEMO_TOKENS, RATIOS = 512, (0.05, 0.1, 0.25, 0.5, 1.0)


def demo_text() -> np.ndarray:
    text = "The number of the red fox is 48213. An old house stood at the end of the long road. "
    ids = np.frombuffer((text * 8).encode(), np.uint8)[:DEMO_TOKENS]
    return ids.astype(np.int64)


def layer_errors(model: Model, ratio: float, cold: Caches) -> np.ndarray:
    """Relative RMS of each linear layer's state after replaying the last `ratio` of the text."""
    start = DEMO_TOKENS - int(np.ceil(ratio * DEMO_TOKENS))
    batch = replay_batch(demo_text(), start, DEMO_TOKENS, NO_SLOT, WARM, DEMO_TOKENS)
    warm = step(model, cold, batch, model.groups)
    pairs = zip(np.asarray(warm.recurrent[WARM]), np.asarray(warm.recurrent[COLD]), strict=True)
    return np.array([relative_rms(found, expected) for found, expected in pairs])


def test_error_of_a_trained_model_falls_with_the_ratio_in_every_group(demo: Model) -> None:
    cold = prefill(demo, demo_text(), [DEMO_TOKENS], [COLD], DEMO_TOKENS)
    errors = np.stack([layer_errors(demo, ratio, cold) for ratio in RATIOS])
    for group in demo.groups:
        of_group = errors[:, list(group.linear)].mean(axis=1)
        assert (np.diff(of_group) <= 0.01).all(), (group, of_group)
        assert of_group[0] > 10 * BOUND, "too short a tail must show"
    assert errors[-1].max() <= BOUND


def test_eight_bit_inputs_cost_less_than_a_short_tail(demo: Model) -> None:
    """A whole replay over e4m3 inputs: group 0 has none and stays exact."""
    exact = prefill(demo, demo_text(), [DEMO_TOKENS], [COLD], DEMO_TOKENS)
    short = layer_errors(demo, 0.1, exact)
    eight = demo._replace(input_dtype=jnp.float8_e4m3fn)
    cold = prefill(eight, demo_text(), [DEMO_TOKENS], [COLD], DEMO_TOKENS)
    errors = layer_errors(eight, 1.0, cold)
    first = list(demo.groups[0].linear)
    assert errors[first].max() <= BOUND
    assert BOUND < np.delete(errors, first).max() < 0.05
    assert np.delete(errors, first).mean() < np.delete(short, first).mean()
