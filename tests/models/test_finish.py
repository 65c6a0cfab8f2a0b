"""A prefill whose last layer runs for last tokens alone, against one that runs it for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jhybrid.batch import Caches, PrefillBatch
from jhybrid.config import ModelConfig
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.models.cut import closing_layers, lower_layers
from jhybrid.models.finish import finish, finish_all
from jhybrid.models.hybrid import Stream, embed, forward, run_layers
from jhybrid.models.specs import ModelParams, cache_partition, cache_specs, model_partition
from jhybrid.params import map_specs
from jhybrid.sharding import REPLICATED, named_sharding, sharded
from jhybrid.weights import load_hf_params
from pallas_kernels import NO_SLOT, Segments
from tests.assertions import assert_close
from tests.engine.tiny import TINY, tiny_params
from tests.golden_files import FOLDERS, name_of
from tests.k3_fixtures import make_tensors, write

PAGE, LENGTHS = 8, (13, 1, 22)
NAMES = ("qwen3_next-next_some_dense", "olmo_hybrid-olmo", "kimi_linear-query_low_rank", "kimi_k3")


def packed_prompts(vocab: int) -> PrefillBatch:
    """Three prompts, two places without one, and tokens of padding; pages in no order."""
    rng, size, count = np.random.default_rng(1), 48, 5
    cu = np.concatenate([[0], np.cumsum(LENGTHS), [sum(LENGTHS)] * 2]).astype(np.int32)
    positions, slots = np.full((2, size), -1, np.int32)
    table = np.full((count, 4), -1, np.int32)
    free = list(rng.permutation(9))
    for n, length in enumerate(LENGTHS):
        pages = np.array([free.pop() for _ in range(-(-length // PAGE))], np.int32)
        table[n, : len(pages)] = pages
        at, here = np.arange(length), slice(cu[n], cu[n + 1])
        positions[here], slots[here] = at, pages[at // PAGE] * PAGE + at % PAGE
    stores = np.array([0, 1, 2, NO_SLOT, NO_SLOT], np.int32)
    segments = Segments(*map(jnp.asarray, (cu, np.full(count, NO_SLOT, np.int32), stores)))
    ids = rng.integers(0, vocab, size).astype(np.int32)
    arrays = [jnp.asarray(x) for x in (ids, positions, slots, cu, table)]
    return PrefillBatch(*arrays, segments=segments)


def compared(params: ModelParams, config: ModelConfig, mesh: Mesh) -> tuple[Any, Any, Any]:
    """(rows, caches) of `forward` and of `finish`, and the rows of `finish_all` behind it."""
    spec = cache_specs(config, 9, PAGE, 3)
    caches: Caches = map_specs(
        lambda s: jnp.full(
            s.shape, jnp.nan, s.dtype_in(jnp.float32), device=named_sharding(mesh, s.axes)
        ),
        spec,
    )
    batch = packed_prompts(min(config.vocab_size, 256))

    def all_rows(p: ModelParams, c: Caches, batch: PrefillBatch) -> Any:
        with jax.default_matmul_precision("highest"):
            return forward(p, c, batch, config)

    def last_rows(p: ModelParams, c: Caches, batch: PrefillBatch) -> Any:
        with jax.default_matmul_precision("highest"):
            stream = Stream(embed(p, batch.token_ids))
            lower = range(closing_layers(config).start)
            stream, new = run_layers(p, stream, c, batch, config, lower)
            assert new is not None
            last, new = finish(p, stream, new, batch, config)
            hidden, again = finish_all(p, stream, new, batch, config)
            return last, new, hidden, again

    pools = cache_partition(config)
    ins = (model_partition(config), pools, REPLICATED)
    one = jax.jit(sharded(all_rows, mesh, ins, (REPLICATED, pools)))
    two = jax.jit(sharded(last_rows, mesh, ins, (REPLICATED, pools) * 2))
    last, new, hidden, again = two(params, caches, batch)
    jax.tree.map(np.testing.assert_array_equal, again, new)
    return one(params, caches, batch), (last, new), hidden


def assert_same(params: ModelParams, config: ModelConfig, mesh: Mesh) -> None:
    (rows, caches), (last, new), hidden = compared(params, config, mesh)
    count = sum(LENGTHS)
    ends = np.cumsum(LENGTHS) - 1
    assert_close("last rows", last[: len(LENGTHS)], rows[ends], 1e-5)
    assert_close("all rows", hidden[:count], rows[:count], 1e-5)
    assert np.isfinite(np.asarray(last)).all()
    for pool, right in zip(jax.tree.leaves(new), jax.tree.leaves(caches), strict=True):
        np.testing.assert_allclose(pool, right, rtol=1e-4, atol=1e-5)  # NaN where none is written


@pytest.mark.parametrize("name", NAMES)
def test_last_rows_are_those_of_a_whole_pass(name: str, tmp_path: Path, mesh: Mesh) -> None:
    folders = {name_of(folder): folder for folder in FOLDERS}
    folder = folders.get(name) or write(tmp_path / "hf", make_tensors())
    config = model_config(read_hf_config(folder))
    assert len(closing_layers(config)) == 1 and lower_layers(config) <= closing_layers(config).start
    assert_same(load_hf_params(folder, config, mesh, jnp.float32), config, mesh)


def test_a_last_layer_that_is_linear_runs_for_all(mesh: Mesh) -> None:
    config = replace(TINY, layers=TINY.layers[:3])
    assert len(closing_layers(config)) == 0
    assert_same(tiny_params(config), config, mesh)
