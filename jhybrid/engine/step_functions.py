"""The jitted functions of an engine, each over local shards with donated buffers where it may.

`caches` are the PartitionSpecs of a model's caches: which pools there are, and how they are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..batch import Caches, PrefillBatch
from ..config import ModelConfig
from ..models.cut import closing_layers, lower_layers
from ..models.finish import finish, finish_all
from ..models.groups import groups
from ..models.hybrid import Stream, embed, forward, logits, run_layers
from ..models.pages import PageKind, copy_pages, put_pages, rows_partition, take_pages
from ..models.replay import replay
from ..models.specs import ModelParams, model_partition
from ..packed import Packed, unpack
from ..retention.maps import MoveMaps
from ..retention.movers import CompressedPool, load, store
from ..sharding import AXIS, REPLICATED, sharded
from .decode_lines import DecodeLines, Drawn, add_pages, decode_batch, set_lines
from .host_moves import put_name, put_sizes
from .sampler import Sampled, SampleMode, SamplerRows, sample, set_row, set_seen, token_logprobs

LOGPROB_BLOCK = 64  # prompt positions whose logits are in memory at once


def step_functions(
    config: ModelConfig, mesh: Mesh, caches: Caches, page_size: int, valid_vocab: int
) -> dict[str, Any]:
    """Those of every engine: run a batch, draw, replay, copy pages, set lines and sampler rows."""
    params, whole = model_partition(config), REPLICATED
    jitted, cut = functools.partial(_jitted, mesh), lower_layers(config)

    def lower(p: ModelParams, c: Caches, packed: Packed) -> tuple[Stream, Caches]:
        batch: PrefillBatch = unpack(packed)
        stream = Stream(embed(p, batch.token_ids))
        stream, new = run_layers(p, stream, c, batch, config, range(cut))
        assert new is not None
        return stream, new

    def upper(
        p: ModelParams, c: Caches, packed: Packed, stream: Stream
    ) -> tuple[Array, Stream, Caches]:
        batch: PrefillBatch = unpack(packed)
        layers = range(cut, closing_layers(config).start)
        stream, new = run_layers(p, stream, c, batch, config, layers)
        assert new is not None
        last, new = finish(p, stream, new, batch, config)
        return last, stream, new

    def decode(
        p: ModelParams, c: Caches, last: Array, drawn: Drawn, lines: DecodeLines
    ) -> tuple[Array, Caches]:
        """`last`: what the step before returned, whose place the result takes."""
        del last
        hidden, new = forward(p, c, decode_batch(lines, drawn, page_size), config)
        assert new is not None
        return hidden, new

    def draw(
        p: ModelParams, state: SamplerRows, hidden: Array, rows: Array, mode: SampleMode
    ) -> tuple[SamplerRows, Sampled]:
        return sample(state, logits(p, hidden, config), rows, mode, valid_vocab)

    def prompt_logprobs(
        p: ModelParams, c: Caches, packed: Packed, stream: Stream, targets: Array
    ) -> tuple[tuple[Array, ...], Caches]:
        hidden, new = finish_all(p, stream, c, unpack(packed), config)
        rows = hidden.shape[0]
        block = min(LOGPROB_BLOCK, rows)
        more = -rows % block  # a bucket may be of any size
        parts = (
            jnp.pad(hidden, ((0, more), (0, 0))).reshape(-1, block, hidden.shape[-1]),
            jnp.pad(targets, (0, more)).reshape(-1, block),
        )
        out = jax.lax.map(
            lambda x: token_logprobs(logits(p, x[0], config), x[1], valid_vocab), parts
        )
        return tuple(x.reshape(-1, *x.shape[2:])[:rows] for x in out), new

    def roll(p: ModelParams, c: Caches, batch: Packed) -> Caches:
        return replay(p, c, unpack(batch), config, groups(config))

    def copy(c: Caches, moves: Packed) -> Caches:
        return copy_pages(c, *unpack(moves))

    def set_one(state: SamplerRows, values: Packed) -> SamplerRows:
        return set_row(state, *unpack(values))

    both = (whole, whole)
    functions = {
        "prefill-lower": jitted(lower, (params, caches, whole), (whole, caches), 1),
        "prefill-upper": jitted(upper, (params, caches, *both), (*both, caches), 1),
        "decode": jitted(
            decode, (params, caches, *both, whole), (whole, caches), (1, 2), keep_unused=True
        ),
        "set_lines": jitted(set_lines, both, whole, 0, keep_unused=True),
        "add_pages": jitted(add_pages, both, whole, 0),
        "prompt_logprobs": jitted(
            prompt_logprobs, (params, caches, whole, *both), (whole, caches), 1
        ),
        "copy_pages": jitted(copy, (caches, whole), caches, 0),
        "set_row": jitted(set_one, (whole, whole), whole, 0),
        "set_seen": jitted(set_seen, (whole, whole, whole, whole), whole, 0),
    }
    for mode in SampleMode:
        drawn = functools.partial(draw, mode=mode)
        ins = (params, whole, whole, whole)
        functions[f"draw-{mode.name}"] = jitted(drawn, ins, (whole, whole), 1)
    if caches.group_inputs is not None:
        functions["replay"] = jitted(roll, (params, caches, whole), caches, 1)
    return functions


def host_functions(mesh: Mesh, caches: Caches, kinds: Iterable[PageKind]) -> dict[str, Any]:
    """Those between the pools and what goes to host memory or comes from there."""
    functions, whole = dict[str, Any](), REPLICATED
    for kind in kinds:
        rows = rows_partition(caches, kind)

        def take(c: Caches, at: Array, kind: PageKind = kind) -> Any:
            return take_pages(c, kind=kind, pages=at)

        def put(c: Caches, new: list[Any], at: Array, kind: PageKind = kind) -> Caches:
            return put_pages(c, kind=kind, rows=new, pages=at)

        functions[f"take-{kind}"] = _jitted(mesh, take, (caches, whole), rows)
        for parts in {parts for parts, _ in put_sizes(kind)}:
            ins = (caches, [rows] * parts, whole)
            functions[put_name(kind, parts)] = _jitted(mesh, put, ins, caches, 0)
    return functions


def compression_functions(
    mesh: Mesh, caches: Caches, pool: CompressedPool, maps: MoveMaps
) -> dict[str, Any]:
    """Those between native and compressed slots; `pool` are the PartitionSpecs of the latter."""
    whole, by_rank = REPLICATED, jax.tree.map(lambda _: PartitionSpec(AXIS), maps)
    ins = (caches, pool, by_rank, whole, whole)
    functions = {"store_states": _jitted(mesh, _store, ins, (pool, whole), 1)}
    for omitted in ("zero", "keep"):
        move = functools.partial(load, omitted=omitted)
        functions[f"load_states-{omitted}"] = _jitted(mesh, move, ins, caches, 0)
    return functions


def _store(
    caches: Caches, pool: CompressedPool, maps: MoveMaps, source: Array, target: Array
) -> tuple[CompressedPool, Array]:
    """Packed states, and something small that can be waited for when the pool is donated again."""
    return store(caches, pool, maps, source, target), jnp.max(target)


def _jitted(
    mesh: Mesh,
    fn: Callable[..., Any],
    ins: Any,
    outs: Any,
    donate: int | tuple[int, ...] = (),
    *,
    keep_unused: bool = False,
) -> Any:
    """`fn` over the mesh; `donate` are the arguments whose buffers the results may take. With
    `keep_unused` that is so of those, too, that are there for their buffers alone."""
    placed = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), ins, is_leaf=lambda x: x is REPLICATED
    )
    return jax.jit(
        sharded(fn, mesh, ins, outs),
        in_shardings=placed,
        donate_argnums=donate,
        keep_unused=keep_unused,
    )
