"""A model run through its caches, in pieces and one token at a time, as an engine would."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jhybrid.batch import Caches, DecodeBatch, PrefillBatch
from jhybrid.config import ModelConfig
from jhybrid.models.hybrid import forward, logits
from jhybrid.models.specs import ModelParams, cache_partition, cache_specs, model_partition
from jhybrid.params import map_specs
from jhybrid.sharding import REPLICATED, named_sharding, sharded
from pallas_kernels import NO_SLOT, Segments

PAGE, SLOT = 8, 1


def cached_logits(
    params: ModelParams,
    token_ids: np.ndarray,
    config: ModelConfig,
    mesh: Mesh,
    pieces: Sequence[int],
) -> np.ndarray:
    """Float32 logits [T, vocab]: prefills of these lengths, then the rest token by token.

    Pages are scattered, and every batch has padding. Caches start as NaN where the model must not
    look, and the slot of the state is new.
    """
    config = config.for_tensor_parallel(mesh.size)
    size = len(token_ids)
    pages = np.random.default_rng(0).permutation(-(-size // PAGE)).astype(np.int32)
    specs = cache_specs(config, len(pages), PAGE, 2)
    caches: Caches = map_specs(
        lambda s: jnp.full(s.shape, jnp.nan, s.dtype_in(jnp.float32), device=_place(mesh, s)),
        specs,
    )
    step = _compiled(config, mesh)
    slots = (pages[:, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1)
    rows, start = [], 0
    for length in pieces:
        at = np.arange(start, start + length, dtype=np.int32)
        batch = PrefillBatch(
            token_ids=_padded(token_ids[at], size, 0),
            positions=_padded(at, size, -1),
            kv_slots=_padded(slots[at], size, -1),
            cu_seqlens=jnp.array([0, length, length], jnp.int32),
            page_table=_padded(pages[None], 2, -1),
            segments=Segments(
                jnp.array([0, length, length], jnp.int32),
                jnp.array([SLOT if start else NO_SLOT, NO_SLOT], jnp.int32),
                jnp.array([SLOT, NO_SLOT], jnp.int32),
            ),
        )
        out, caches = step(params, caches, batch)
        rows.append(np.asarray(out)[:length])
        start += length
    for position in range(start, size):
        at = np.array([position], np.int32)
        batch = DecodeBatch(
            token_ids=_padded(token_ids[at], 2, 0),
            positions=_padded(at, 2, -1),
            kv_slots=_padded(slots[at], 2, -1),
            page_table=_padded(pages[None], 2, -1),
            state_slots=jnp.array([SLOT, NO_SLOT], jnp.int32),
        )
        out, caches = step(params, caches, batch)
        rows.append(np.asarray(out)[:1])
    return np.concatenate(rows)


def _place(mesh: Mesh, spec: Any) -> Any:
    return named_sharding(mesh, spec.axes)


def _padded(x: np.ndarray, size: int, value: int) -> Array:
    rest = np.full((size - len(x), *x.shape[1:]), value, np.int32)
    return jnp.asarray(np.concatenate([x, rest]).astype(np.int32))


@functools.lru_cache(maxsize=4)
def _compiled(config: ModelConfig, mesh: Mesh) -> Any:
    def run(p: ModelParams, c: Caches, batch: Any) -> tuple[Array, Any]:
        with jax.default_matmul_precision("highest"):
            hidden, new = forward(p, c, batch, config)
            return logits(p, hidden, config), new

    caches = cache_partition(config)
    ins, outs = (model_partition(config), caches, REPLICATED), (REPLICATED, caches)
    wrapped = sharded(run, mesh, ins, outs)
    return jax.jit(wrapped, donate_argnums=1)
