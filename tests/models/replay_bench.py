"""Models of every family in small, and replays of their group inputs, step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jhybrid.batch import Caches, PrefillBatch, ReplayBatch
from jhybrid.config import ModelConfig
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.models.groups import Group, groups
from jhybrid.models.hybrid import decoder_layer, forward
from jhybrid.models.replay import read_group_inputs, replay
from jhybrid.models.specs import (
    ModelParams,
    cache_partition,
    cache_specs,
    model_partition,
    model_specs,
)
from jhybrid.params import init_params, map_specs
from jhybrid.sharding import REPLICATED, named_sharding, sharded
from pallas_kernels import CONTINUE, NO_SLOT, Segments
from tests.assertions import relative_rms
from tests.golden_files import FOLDERS, name_of

PAGE, TOKENS, WIDTH = 8, 75, 96
COLD, OTHER, WARM, SLOTS = 0, 1, 2, 4


class Model(NamedTuple):
    params: ModelParams
    config: ModelConfig
    mesh: Mesh
    input_dtype: Any = None

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups(self.config)


def make_model(name: str, mesh: Mesh, seed: int = 0) -> Model:
    """The layers of a golden checkpoint in an irregular stack of three groups, random weights.

    The second of two full layers in a row starts a group, the first has none.
    """
    folder = next(folder for folder in FOLDERS if name_of(folder) == name)
    config = model_config(read_hf_config(folder))
    linear, full = (
        next(layer for layer in reversed(config.layers) if layer.mixer == kind)
        for kind in ("linear", "full")
    )
    stack = (linear, linear, full, linear, full, full, linear)
    config = replace(config, layers=stack).for_tensor_parallel(mesh.size)
    params = init_params(model_specs(config), jax.random.key(seed), jnp.float32, mesh)
    return Model(params, config, mesh)


@functools.lru_cache(maxsize=32)
def _compiled(config: ModelConfig, mesh: Mesh, input_dtype: Any, of: Any) -> Any:
    """The jitted forward (`of` None) or a replay of the groups `of`."""
    caches = cache_partition(config, group_inputs=True, input_dtype=input_dtype)

    def run(params: ModelParams, c: Caches, batch: Any) -> Caches | None:
        with jax.default_matmul_precision("highest"):
            if of is None:
                return forward(params, c, batch, config)[1]
            return replay(params, c, batch, config, of)

    ins = (model_partition(config), caches, REPLICATED)
    return jax.jit(sharded(run, mesh, ins, caches))


def whole_layers(
    params: ModelParams, caches: Any, batch: PrefillBatch, config: ModelConfig, group: Group
) -> Caches:
    """A group's whole decoder layers, feed-forward blocks and all, over its kept inputs."""
    x: Array = params.embedding[batch.token_ids]
    if group.stored is not None:
        assert batch.input_slots is not None
        x = read_group_inputs(caches.group_inputs, group.stored, batch.input_slots, x.dtype)
    for number, index in zip(group.layers, group.linear, strict=True):
        x, caches = decoder_layer(params.layers[number], x, caches, index, batch, config)
    return caches


def step(model: Model, caches: Caches, batch: Any, of: Any = None) -> Caches:
    fn = _compiled(model.config, model.mesh, model.input_dtype, of)
    return fn(model.params, caches, batch)


def empty_caches(model: Model, tokens: int = WIDTH) -> Caches:
    """NaN wherever nothing was written, so that reading there shows."""
    specs = cache_specs(
        model.config, tokens // PAGE, PAGE, SLOTS, tokens // PAGE, model.input_dtype
    )

    def one(spec: Any) -> Array:
        place = named_sharding(model.mesh, spec.axes)
        return jnp.full(spec.shape, jnp.nan, spec.dtype_in(jnp.float32), device=place)

    return map_specs(one, specs)


def segments(cuts: Sequence[int], load: int, stores: Sequence[int]) -> Segments:
    """One sequence whose state is stored at every cut, with unused segments behind."""
    count = len(cuts) + 2
    cu = np.array([0, *cuts, *[cuts[-1]] * 2], np.int32)
    loads, kept = np.full(count, NO_SLOT, np.int32), np.full(count, NO_SLOT, np.int32)
    loads[: len(cuts)], kept[: len(cuts)] = CONTINUE, stores
    loads[0] = load
    return Segments(jnp.asarray(cu), jnp.asarray(loads), jnp.asarray(kept))


def scattered(positions: np.ndarray, width: int) -> np.ndarray:
    pages = np.random.default_rng(0).permutation(width // PAGE)
    return pages[positions // PAGE] * PAGE + positions % PAGE


def padded(x: np.ndarray, size: int, value: int) -> Array:
    return jnp.asarray(np.pad(x, (0, size - len(x)), constant_values=value).astype(np.int32))


def prefill(
    model: Model, tokens: np.ndarray, cuts: Sequence[int], stores: Sequence[int], width: int = WIDTH
) -> Caches:
    """Caches after a cold prefill that leaves its state at `cuts` in the slots `stores`."""
    at = np.arange(cuts[-1])
    slots = padded(scattered(at, width), width, -1)
    table = np.random.default_rng(0).permutation(width // PAGE).astype(np.int32)
    batch = PrefillBatch(
        token_ids=padded(tokens[at], width, 0),
        positions=padded(at, width, -1),
        kv_slots=slots,
        cu_seqlens=jnp.array([0, len(at), len(at)], jnp.int32),
        page_table=jnp.asarray(np.stack([table, table])),
        segments=segments(cuts, NO_SLOT, stores),
        input_slots=slots,
    )
    return step(model, empty_caches(model, width), batch)


def replay_batch(
    tokens: np.ndarray, start: int, end: int, load: int, store: int, width: int = WIDTH
) -> ReplayBatch:
    at = np.arange(start, end)
    return ReplayBatch(
        token_ids=padded(tokens[at], width, 0),
        input_slots=padded(scattered(at, width), width, -1),
        segments=segments([end - start], load, [store]),
    )


def assert_states(caches: Caches, slot: int, expected: Caches, of: int, bound: float) -> None:
    for name in ("recurrent", "conv"):
        found = np.asarray(getattr(caches, name)[slot], np.float64)
        wanted = np.asarray(getattr(expected, name)[of], np.float64)
        for layer in range(found.shape[0]):
            error = relative_rms(found[layer], wanted[layer])
            assert error <= bound, f"{name} of linear layer {layer}: relative RMS {error:.1e}"


def random_tokens(config: ModelConfig, count: int = TOKENS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, min(config.vocab_size, 96), count)
