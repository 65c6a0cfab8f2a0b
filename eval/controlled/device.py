"""The device side: caches of one block, and the six programs that change or read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Bool, Float, Int32

from jhybrid.batch import Caches, DecodeBatch, PrefillBatch, ReplayBatch
from jhybrid.config import ModelConfig
from jhybrid.engine.build import LoadedModel
from jhybrid.engine.programs import compile_side_by_side, compiler_options
from jhybrid.models.groups import groups
from jhybrid.models.hybrid import forward, logits
from jhybrid.models.replay import replay
from jhybrid.models.specs import ModelParams, cache_partition, cache_specs, model_partition
from jhybrid.params import map_specs, shardings
from jhybrid.sharding import REPLICATED, sharded
from pallas_kernels import NO_SLOT
from pallas_kernels.ragged_pack.reference import quantise

from ..interventions import zero_full_kv
from .layout import Block, Layout

LOGITS = 2**25  # entries of a block of logits in memory at once
CHECK = 8  # decode steps between two looks at whether all answers have ended


class Device:
    """Owns the caches of a block; every call replaces them by what it returns.

    `ends` [V] marks the tokens that end a text, V being the tokens that the tokenizer knows.
    """

    def __init__(self, model: LoadedModel, layout: Layout, ends: Bool[np.ndarray, " V"]) -> None:
        self.layout, self.ends, self._params = layout, ends, model.params
        specs = block_specs(model.config, layout)
        self.caches: Caches = jax.device_put(
            map_specs(lambda s: np.zeros(s.shape, s.dtype_in(model.dtype)), specs),
            shardings(specs, model.mesh),
        )
        made = programs(model.config, model.mesh, layout, len(ends))
        width, dtype = model.config.hidden_size, model.params.embedding.dtype
        hidden = jax.ShapeDtypeStruct(
            (layout.tokens, width), dtype, sharding=NamedSharding(model.mesh, REPLICATED)
        )
        given = arguments(model.params, self.caches, layout, hidden, ends)
        options = compiler_options(model.mesh.devices.flat[0].platform)
        calls = list(zip(made, given, strict=True))
        done = dict(compile_side_by_side(calls, options))
        self._run = Programs(*(done[place] for place in range(len(calls))))

    def prefill(self, batch: PrefillBatch) -> Float[Array, "T D"]:
        """Run the packed spans; the residual stream behind each token."""
        hidden, self.caches = self._run.prefill(self._params, self.caches, batch)
        return hidden

    def replay(self, batch: ReplayBatch) -> None:
        """Roll linear states forward over the group inputs of the packed spans."""
        self.caches = self._run.replay(self._params, self.caches, batch)

    def restore(
        self, rows: Bool[np.ndarray, "Ll H K"], *, int8: bool, keep: bool, windows: bool
    ) -> None:
        """See the function `restore`."""
        flags = (np.bool_(int8), np.bool_(keep), np.bool_(windows))
        self.caches = self._run.restore(self.caches, rows, *flags)

    def zero_kv(self) -> None:
        """For good: the next block's prefill writes them anew."""
        self.caches = self._run.zero_kv(self.caches)

    def compare(self, hidden: Array, other: Array, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """See `comparison`."""
        return tuple(map(np.asarray, self._run.compare(self._params, hidden, other, targets)))

    def generate(
        self,
        first: Int32[np.ndarray, " N"],
        limits: Int32[np.ndarray, " N"],
        batch: DecodeBatch,
        stopped: Callable[[np.ndarray], Bool[np.ndarray, " N"]],
    ) -> Int32[np.ndarray, "N T"]:
        """Greedy continuations of `first`, each row at most `limits` tokens with it.

        `stopped` says of the tokens so far which rows have ended for another reason than a token;
        it is asked now and then. What a row has behind its end is of no meaning.
        """
        out: list[Any] = [first]
        token: Any = first
        left: Any = np.where(self.ends[first], 0, np.maximum(limits - 1, 0)).astype(np.int32)
        while len(out) < limits.max():
            if len(out) % CHECK == 0:
                left = np.where(stopped(np.stack(out, axis=1)), 0, left)
                if not left.any():
                    break
            args = (self._params, self.caches, token, left, self.ends, batch)
            token, left, batch, self.caches = self._run.decode(*args)
            out.append(token)
        return np.stack(out, axis=1)


class Programs(NamedTuple):
    """Functions of one block's shapes; those that take caches are given them for good."""

    prefill: Any
    replay: Any
    compare: Any
    decode: Any
    restore: Any
    zero_kv: Any


def block_specs(config: ModelConfig, layout: Layout) -> Any:
    """The caches of a block: every token keeps its KV and its group inputs."""
    pages = layout.pages
    return cache_specs(config, pages, layout.page_size, layout.slots, pages)


def programs(config: ModelConfig, mesh: Mesh, layout: Layout, valid: int) -> Programs:
    """Jitted, not compiled. `valid` tokens are known to the tokenizer."""
    params, whole = model_partition(config), REPLICATED
    caches = cache_partition(config, group_inputs=True)
    places = shardings(block_specs(config, layout), mesh)

    def jitted(fn: Callable[..., Any], ins: Any, outs: Any, donated: int | None) -> Any:
        placed = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), ins, is_leaf=lambda x: x is whole
        )
        donate = () if donated is None else donated
        return jax.jit(sharded(fn, mesh, ins, outs), in_shardings=placed, donate_argnums=donate)

    def prefill(p: ModelParams, c: Caches, batch: PrefillBatch) -> tuple[Array, Caches | None]:
        return forward(p, c, batch, config)

    def roll(p: ModelParams, c: Caches, batch: ReplayBatch) -> Caches:
        return replay(p, c, batch, config, groups(config))

    def compare(p: ModelParams, hidden: Array, other: Array, targets: Array) -> Any:
        return comparison(lambda h: logits(p, h, config)[:, :valid], hidden, other, targets)

    def decode(
        p: ModelParams, c: Caches, token: Array, left: Array, ends: Array, batch: DecodeBatch
    ) -> tuple[Array, Array, DecodeBatch, Caches | None]:
        going = left > 0
        step = replace(
            batch,
            token_ids=token,
            positions=jnp.where(going, batch.positions, -1),
            kv_slots=jnp.where(going, slots_of(batch, layout.page_size), -1),
            state_slots=jnp.where(going, batch.state_slots, NO_SLOT),
            input_slots=jnp.full_like(token, -1),
        )
        hidden, new = forward(p, c, step, config)
        best = jnp.argmax(logits(p, hidden, config)[:, :valid], axis=-1).astype(jnp.int32)
        left = jnp.where(ends[best], 0, jnp.maximum(left - 1, 0))
        return best, left, replace(batch, positions=batch.positions + 1), new

    return Programs(
        jitted(prefill, (params, caches, whole), (whole, caches), 1),
        jitted(roll, (params, caches, whole), caches, 1),
        jitted(compare, (params, whole, whole, whole), whole, None),
        jitted(decode, (params, caches, *[whole] * 4), (*[whole] * 3, caches), 1),
        jax.jit(restore, donate_argnums=0, out_shardings=places),
        jax.jit(zero_full_kv, donate_argnums=0, out_shardings=places),
    )


def arguments(
    params: ModelParams,
    caches: Caches,
    layout: Layout,
    hidden: jax.ShapeDtypeStruct,
    ends: np.ndarray,
) -> Programs:
    """Of every program: batches without a problem."""
    nobody = Block((), layout)
    row = np.zeros(layout.rows, np.int32)
    targets = np.zeros(layout.tokens, np.int32)
    masks = np.zeros(caches.recurrent.shape[1:-1], np.bool_), *[np.bool_(False)] * 3
    return Programs(
        (params, caches, nobody.prefill((), write=False)),
        (params, caches, nobody.replay(())),
        (params, hidden, hidden, targets),
        (params, caches, row, row, ends, nobody.decode()),
        (caches, *masks),
        (caches,),
    )


def slots_of(batch: DecodeBatch, page_size: int) -> Int32[Array, " N"]:
    """Where the KV of each row's position is."""
    page = jnp.take_along_axis(batch.page_table, batch.positions[:, None] // page_size, axis=1)
    return page[:, 0] * page_size + batch.positions % page_size


def restore(
    caches: Caches, rows: Bool[Array, "Ll H K"], int8: Array, keep: Array, windows: Array
) -> Caches:
    """The arms' slots (the second half) from those of the prefixes (the first).

    States get the checkpoint's `rows`, through INT8 if so asked, and `keep` what they have in the
    others, or get zeros; conv windows the checkpoint's, or what `keep` says.
    """
    half = caches.recurrent.shape[0] // 2
    kept, now = caches.recurrent[:half], caches.recurrent[half:]
    values, scales = quantise(kept)
    kept = jnp.where(int8, values.astype(kept.dtype) * scales[..., None], kept)
    states = jnp.where(rows[..., None], kept, jnp.where(keep, now, 0))
    conv = jnp.where(keep, caches.conv[half:], 0)
    conv = jnp.where(windows, caches.conv[:half], conv)
    return replace(
        caches,
        recurrent=caches.recurrent.at[half:].set(states),
        conv=caches.conv.at[half:].set(conv),
    )


def comparison(
    scores: Callable[[Array], Array],
    hidden: Float[Array, "T D"],
    other: Float[Array, "T D"],
    targets: Int32[Array, " T"],
) -> tuple[Array, Array, Array]:
    """Of each token: log-probability of its target, KL(other || its own), and the best token.

    `scores` makes logits of rows of hidden; it is called on a few at a time.
    """
    vocab = jax.eval_shape(scores, hidden).shape[1]
    block = math.gcd(hidden.shape[0], 2 ** int(math.log2(max(1, LOGITS // vocab))))

    def one(rows: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        own, reference = (jax.nn.log_softmax(scores(x)) for x in rows[:2])
        at = jnp.take_along_axis(own, rows[2][:, None], axis=1)[:, 0]
        kl = jnp.sum(jnp.exp(reference) * (reference - own), axis=1)
        return at, kl, jnp.argmax(own, axis=1).astype(jnp.int32)

    parts = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), (hidden, other, targets))
    return jax.tree.map(lambda x: x.reshape(-1), jax.lax.map(one, parts))
