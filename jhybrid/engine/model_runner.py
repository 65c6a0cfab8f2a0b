"""The device side of the engine: the few jitted functions, their buckets, and what they own.

`ModelRunner` holds parameters, caches and sampler rows and replaces the donated ones with what
each call returns. It knows shapes, not requests. Calls return at once; results are read later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import NO_SLOT, Segments

from ..batch import Caches, DecodeBatch, PrefillBatch
from ..config import ModelConfig
from ..models.hybrid import (
    REPLICATED,
    ModelParams,
    cache_partition,
    cache_specs,
    forward,
    last_hidden,
    logits,
    model_partition,
    sharded,
)
from ..params import map_specs
from ..sharding import named_sharding
from .sampler import (
    RowParams,
    Sampled,
    SampleMode,
    SamplerRows,
    init_rows,
    sample,
    set_row,
    set_seen,
    token_logprobs,
)

LOGPROB_BLOCK = 64  # prompt positions whose logits are in memory at once


@dataclass(frozen=True)
class Buckets:
    """The static shapes of an engine; every step is padded to one of them."""

    prefill_tokens: tuple[int, ...]
    prefill_sequences: tuple[int, ...]
    decode: tuple[int, ...]
    checkpoint_interval: int
    pages: int  # page-table width

    def segments(self, tokens: int, sequences: int) -> int:
        """Segments of a prefill: its checkpoints on the grid, and four for each sequence (a part of
        an interval, a branch, the end of the prompt, and the rest)."""
        return -(-tokens // self.checkpoint_interval) + 4 * sequences


def make_buckets(
    max_prefill_tokens: int, max_running: int, checkpoint_interval: int, pages: int
) -> Buckets:
    tokens = _powers(min(64, max_prefill_tokens), max_prefill_tokens, 4)
    sequences = _powers(1, min(max_running, 16), 4)
    decode = _powers(1, max_running, 2)
    return Buckets(tokens, sequences, decode, checkpoint_interval, pages)


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, low * factor, ... and high itself."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


def bucket(sizes: tuple[int, ...], needed: int) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise RuntimeError(f"a step needs {needed}, the largest bucket of {sizes} is smaller")


def _host(x: np.ndarray) -> Any:
    """A host array as a batch field: it becomes a device array when a jitted function is called."""
    return x


class ModelRunner:
    def __init__(
        self,
        params: ModelParams,
        config: ModelConfig,
        mesh: Mesh,
        buckets: Buckets,
        *,
        pages: int,
        page_size: int,
        slots: int,
        max_running: int,
        valid_vocab: int,
        dtype: Any,
    ) -> None:
        self.params, self.config, self.mesh, self.buckets = params, config, mesh, buckets
        self.page_size, self.valid_vocab = page_size, valid_vocab
        self._replicated = NamedSharding(mesh, REPLICATED)
        specs = cache_specs(config, pages, page_size, slots)
        self.caches: Caches = map_specs(
            lambda s: jnp.zeros(s.shape, s.dtype_in(dtype), device=named_sharding(mesh, s.axes)),
            specs,
        )
        self.rows: SamplerRows = jax.device_put(
            init_rows(max_running, config.vocab_size), self._replicated
        )
        self._build()

    def _build(self) -> None:
        config, mesh, valid = self.config, self.mesh, self.valid_vocab
        params, caches, whole = model_partition(config), cache_partition(config), REPLICATED

        def prefill(p: ModelParams, c: Caches, batch: PrefillBatch) -> tuple[Array, Array, Caches]:
            hidden, new = forward(p, c, batch, config)
            assert new is not None
            return last_hidden(hidden, batch), hidden, new

        def decode(
            p: ModelParams, c: Caches, last_token: Array, rows: Array, batch: DecodeBatch
        ) -> tuple[Array, Caches]:
            tokens = last_token[jnp.maximum(rows, 0)]
            hidden, new = forward(p, c, replace(batch, token_ids=tokens), config)
            assert new is not None
            return hidden, new

        def draw(
            p: ModelParams, state: SamplerRows, hidden: Array, rows: Array, mode: SampleMode
        ) -> tuple[SamplerRows, Sampled]:
            return sample(state, logits(p, hidden, config), rows, mode, valid)

        def prompt_logprobs(p: ModelParams, hidden: Array, targets: Array) -> tuple[Array, ...]:
            block = min(LOGPROB_BLOCK, hidden.shape[0])
            parts = (
                hidden.reshape(-1, block, hidden.shape[-1]),
                targets.reshape(-1, block),
            )
            out = jax.lax.map(lambda x: token_logprobs(logits(p, x[0], config), x[1], valid), parts)
            return tuple(x.reshape(-1, *x.shape[2:]) for x in out)

        def copy_pages(c: Caches, source: Array, target: Array) -> Caches:
            def one(pages: Array) -> Array:
                drop = jnp.where(target >= 0, target, pages.shape[0])
                return pages.at[drop].set(pages[jnp.maximum(source, 0)], mode="drop")

            values = None if c.values is None else one(c.values)
            return replace(c, keys=one(c.keys), values=values)

        def wrap(fn: Callable[..., Any], ins: Any, outs: Any, **jit: Any) -> Callable[..., Any]:
            return jax.jit(sharded(fn, mesh, ins, outs), **jit)

        self._prefill = wrap(
            prefill, (params, caches, whole), (whole, whole, caches), donate_argnums=1
        )
        self._decode = wrap(
            decode, (params, caches, whole, whole, whole), (whole, caches), donate_argnums=1
        )
        self._draw = {
            mode: wrap(
                functools.partial(draw, mode=mode),
                (params, whole, whole, whole),
                (whole, whole),
                donate_argnums=1,
            )
            for mode in SampleMode
        }
        self._prompt_logprobs = wrap(prompt_logprobs, (params, whole, whole), whole)
        self._copy_pages = wrap(copy_pages, (caches, whole, whole), caches, donate_argnums=0)
        self._set_row = wrap(set_row, (whole, whole, whole), whole, donate_argnums=0)
        self._set_seen = wrap(set_seen, (whole, whole, whole, whole), whole, donate_argnums=0)

    def prefill(self, batch: PrefillBatch) -> tuple[Array, Array]:
        """Run packed prompts; returns the hidden rows of each sequence's last token and of all."""
        last, hidden, self.caches = self._prefill(self.params, self.caches, batch)
        return last, hidden

    def decode(self, rows: np.ndarray, batch: DecodeBatch) -> Array:
        """Run each row's last token (which never left the device); returns hidden rows."""
        last_token = self.rows.params.last_token
        hidden, self.caches = self._decode(self.params, self.caches, last_token, rows, batch)
        return hidden

    def draw(self, hidden: Array, rows: np.ndarray, mode: SampleMode) -> Sampled:
        """Sample the next token of each row (-1: padding)."""
        self.rows, out = self._draw[mode](self.params, self.rows, hidden, rows)
        for leaf in jax.tree.leaves(out):
            leaf.copy_to_host_async()
        return out

    def prompt_logprobs(self, hidden: Array, targets: np.ndarray) -> tuple[Array, ...]:
        """Log-probabilities of `targets` [T] under hidden rows [T, D], and the best ones."""
        return self._prompt_logprobs(self.params, hidden, targets)

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target); a batch never reads a page that it writes."""
        width = self.buckets.decode[-1]
        for start in range(0, len(copies), width):
            pairs = np.full((2, width), -1, np.int32)
            part = copies[start : start + width]
            pairs[:, : len(part)] = np.array(part, np.int32).T
            self.caches = self._copy_pages(self.caches, pairs[0], pairs[1])

    def set_row(self, row: int, values: RowParams) -> None:
        self.rows = self._set_row(self.rows, np.int32(row), values)

    def set_seen(self, row: int, in_prompt: np.ndarray, counts: np.ndarray) -> None:
        self.rows = self._set_seen(self.rows, np.int32(row), in_prompt, counts)

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    def pool_bytes(self) -> dict[str, int]:
        """Bytes of each pool over all ranks."""
        c = self.caches
        values = 0 if c.values is None else c.values.nbytes
        return {
            "kv_pages": c.keys.nbytes + values,
            "native_slots": c.recurrent.nbytes + c.conv.nbytes,
        }

    def compilations(self) -> int:
        """How many shapes have been compiled so far, over all functions."""
        functions = [
            self._prefill,
            self._decode,
            self._prompt_logprobs,
            self._copy_pages,
            self._set_row,
            self._set_seen,
            *self._draw.values(),
        ]
        return sum(fn._cache_size() for fn in functions)

    def warm_up(self) -> Iterator[str]:
        """Compile every function at every bucket by running it on padding; yields what is done."""
        for tokens in self.buckets.prefill_tokens:
            for sequences in self.buckets.prefill_sequences:
                last, hidden = self.prefill(self.empty_prefill(tokens, sequences))
                for mode in SampleMode:
                    self.draw(last, np.full(sequences, -1, np.int32), mode)
                self.prompt_logprobs(hidden, np.zeros(tokens, np.int32))
                yield f"prefill {tokens} tokens, {sequences} sequences"
        for size in self.buckets.decode:
            rows = np.full(size, -1, np.int32)
            hidden = self.decode(rows, self.empty_decode(size))
            for mode in SampleMode:
                self.draw(hidden, rows, mode)
            yield f"decode {size} sequences"
        self.copy_pages([(-1, -1)])
        row = jax.tree.map(lambda x: np.asarray(x[0]), self.rows)
        self.set_row(0, row.params)
        self.set_seen(0, row.in_prompt, row.counts)
        jax.block_until_ready((self.caches, self.rows))
        yield "cache movers"

    def warm_up_steps(self) -> int:
        b = self.buckets
        return len(b.prefill_tokens) * len(b.prefill_sequences) + len(b.decode) + 1

    def empty_prefill(self, tokens: int, sequences: int) -> PrefillBatch:
        """A batch of padding only, in numpy: the canvas that a real one is drawn on."""
        segments = self.buckets.segments(tokens, sequences)
        return PrefillBatch(
            token_ids=_host(np.zeros(tokens, np.int32)),
            positions=_host(np.full(tokens, -1, np.int32)),
            kv_slots=_host(np.full(tokens, -1, np.int32)),
            cu_seqlens=_host(np.zeros(sequences + 1, np.int32)),
            page_table=_host(np.full((sequences, self.buckets.pages), -1, np.int32)),
            segments=Segments(
                _host(np.zeros(segments + 1, np.int32)),
                _host(np.full(segments, NO_SLOT, np.int32)),
                _host(np.full(segments, NO_SLOT, np.int32)),
            ),
        )

    def empty_decode(self, size: int) -> DecodeBatch:
        return DecodeBatch(
            token_ids=_host(np.zeros(size, np.int32)),
            positions=_host(np.full(size, -1, np.int32)),
            kv_slots=_host(np.full(size, -1, np.int32)),
            page_table=_host(np.full((size, self.buckets.pages), -1, np.int32)),
            state_slots=_host(np.full(size, NO_SLOT, np.int32)),
        )
