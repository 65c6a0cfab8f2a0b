"""The device side of the engine: the few jitted functions, their buckets, and what they own.

`ModelRunner` holds parameters, caches and sampler rows and replaces the donated ones with what
each call returns. It knows shapes, not requests. Calls return at once; results are read later.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import NO_SLOT, Segments, prefers_whole_prompt

from ..batch import Caches, DecodeBatch, PrefillBatch, ReplayBatch
from ..cache.host_store import CHUNK_ROWS, padded_rows
from ..config import AttentionConfig, ModelConfig
from ..models.groups import groups
from ..models.hybrid import forward, last_hidden, logits
from ..models.pages import PageKind, copy_pages, pools, put_pages, take_pages
from ..models.replay import replay
from ..models.specs import ModelParams, cache_partition, cache_specs, model_partition
from ..params import map_specs, partition_specs
from ..retention.maps import MoveMaps
from ..retention.movers import CompressedPool, compressed_specs, load, store
from ..sharding import AXIS, REPLICATED, named_sharding, sharded
from .buckets import MAX_REPLAYS, MOVES, Buckets
from .compression import Compression
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

Shape = tuple[int, ...]

Options = dict[str, bool | int | float | str]

# The code is as fast as with full optimisation and is there a third sooner.
CPU_OPTIONS: Options = {"xla_backend_optimization_level": 1}
# Tuning compiles dozens of Triton kernels for every shape of a product, most of a start's time, and
# then chooses cuBLAS. Merged products would copy their weights into one matrix in every step.
GPU_OPTIONS: Options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
COMPILER_OPTIONS = {"cpu": CPU_OPTIONS, "gpu": GPU_OPTIONS}

LOGPROB_BLOCK = 64  # prompt positions whose logits are in memory at once


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
        input_pages: int = 0,
        input_dtype: Any = None,
        host: bool = False,
        compression: Compression | None = None,
        compressed_slots: int = 0,
    ) -> None:
        self.params, self.config, self.mesh, self.buckets = params, config, mesh, buckets
        self.page_size, self.valid_vocab = page_size, valid_vocab
        self._replicated = NamedSharding(mesh, REPLICATED)
        self._functions: dict[str, Any] = {}
        self._executables: dict[tuple[str, Shape], Any] = {}

        def zeros(specs: Any) -> Any:
            return map_specs(
                lambda s: jnp.zeros(
                    s.shape, s.dtype_in(dtype), device=named_sharding(mesh, s.axes)
                ),
                specs,
            )

        specs = cache_specs(config, pages, page_size, slots, input_pages, input_dtype)
        self.caches: Caches = zeros(specs)
        self.input_dtype = input_dtype
        inputs: tuple[PageKind, ...] = ("inputs",) if input_pages else ()
        self._host_kinds: tuple[PageKind, ...] = ("kv", *inputs, "states") if host else ()
        self.compression = compression
        self.compressed: CompressedPool | None = None
        if compression is not None:
            by_rank = NamedSharding(mesh, PartitionSpec(AXIS))
            self._maps: MoveMaps = jax.device_put(compression.maps, by_rank)
            specs = compressed_specs(config, self._maps, compressed_slots, compression.dtype)
            self.compressed = zeros(specs)
            self._compressed_partition = partition_specs(specs)
        self.rows: SamplerRows = jax.device_put(
            init_rows(max_running, config.vocab_size), self._replicated
        )
        self._build()

    def _build(self) -> None:
        config, mesh, valid = self.config, self.mesh, self.valid_vocab
        keep, dtype = self.caches.group_inputs is not None, self.input_dtype
        caches = cache_partition(config, group_inputs=keep, input_dtype=dtype)
        params, whole = model_partition(config), REPLICATED

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

        def roll(p: ModelParams, c: Caches, batch: ReplayBatch) -> Caches:
            return replay(p, c, batch, config, groups(config))

        def wrap(
            name: str, fn: Callable[..., Any], ins: Any, outs: Any, donate: int | None
        ) -> None:
            placed = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), ins, is_leaf=lambda x: x is whole
            )
            self._functions[name] = jax.jit(
                sharded(fn, mesh, ins, outs),
                in_shardings=placed,
                donate_argnums=() if donate is None else donate,
            )

        wrap("prefill", prefill, (params, caches, whole), (whole, whole, caches), 1)
        wrap("decode", decode, (params, caches, whole, whole, whole), (whole, caches), 1)
        for mode in SampleMode:
            drawn = functools.partial(draw, mode=mode)
            wrap(f"draw-{mode.name}", drawn, (params, whole, whole, whole), (whole, whole), 1)
        wrap("prompt_logprobs", prompt_logprobs, (params, whole, whole), whole, None)
        wrap("copy_pages", copy_pages, (caches, whole, whole), caches, 0)
        if self.caches.group_inputs is not None:
            wrap("replay", roll, (params, caches, whole), caches, 1)
        self._rows: dict[PageKind, Any] = {kind: pools(caches, kind) for kind in self._host_kinds}
        for kind, rows in self._rows.items():
            take = functools.partial(take_pages, kind=kind)
            wrap(f"take-{kind}", lambda c, at, f=take: f(c, pages=at), (caches, whole), rows, None)
            put = functools.partial(put_pages, kind=kind)
            wrap(
                f"put-{kind}",
                lambda c, new, at, f=put: f(c, rows=new, pages=at),
                (caches, rows, whole),
                caches,
                0,
            )
        if self.compression is not None:
            by_rank = jax.tree.map(lambda _: PartitionSpec(AXIS), self._maps)
            pool = self._compressed_partition
            ins = (caches, pool, by_rank, whole, whole)
            wrap("store_states", _store, ins, (pool, whole), 1)
            for omitted in ("zero", "keep"):
                move = functools.partial(load, omitted=omitted)
                wrap(f"load_states-{omitted}", move, ins, caches, 0)
        wrap("set_row", set_row, (whole, whole, whole), whole, 0)
        wrap("set_seen", set_seen, (whole, whole, whole, whole), whole, 0)

    def _call(self, name: str, size: Shape, *args: Any) -> Any:
        """Run a function at a bucket, compiling it if the warm-up has not."""
        return self.prepare(name, size, args)(*args)

    def prepare(self, name: str, size: Shape, args: tuple[Any, ...]) -> Any:
        """The executable of a function at a bucket; compiled for `args` if it is not there."""
        executable = self._executables.get((name, size))
        if executable is None:
            executable = self._executables[name, size] = self._compile(name, args)
        return executable

    def _compile(self, name: str, args: tuple[Any, ...]) -> Any:
        options = COMPILER_OPTIONS.get(self.mesh.devices.flat[0].platform, {})
        return self._functions[name].lower(*args).compile(compiler_options=options)

    def prefill(self, batch: PrefillBatch) -> tuple[Array, Array]:
        """Run packed prompts; returns the hidden rows of each sequence's last token and of all."""
        size = (batch.token_ids.shape[0], batch.page_table.shape[0], int(batch.whole_prompt))
        last, hidden, self.caches = self._call("prefill", size, self.params, self.caches, batch)
        return last, hidden

    def decode(self, rows: np.ndarray, batch: DecodeBatch) -> Array:
        """Run each row's last token (which never left the device); returns hidden rows."""
        args = (self.params, self.caches, self.rows.params.last_token, rows, batch)
        hidden, self.caches = self._call("decode", rows.shape, *args)
        return hidden

    def draw(self, hidden: Array, rows: np.ndarray, mode: SampleMode) -> Sampled:
        """Sample the next token of each row (-1: padding)."""
        args = (self.params, self.rows, hidden, rows)
        self.rows, out = self._call(f"draw-{mode.name}", rows.shape, *args)
        for leaf in jax.tree.leaves(out):
            leaf.copy_to_host_async()
        return out

    def prompt_logprobs(self, hidden: Array, targets: np.ndarray) -> tuple[Array, ...]:
        """Log-probabilities of `targets` [T] under hidden rows [T, D], and the best ones."""
        return self._call("prompt_logprobs", targets.shape, self.params, hidden, targets)

    def replay(self, batch: ReplayBatch) -> None:
        """Roll states forward over group inputs."""
        size = batch.token_ids.shape
        self.caches = self._call("replay", size, self.params, self.caches, batch)

    def copy_pages(
        self, copies: list[tuple[int, int]], input_copies: list[tuple[int, int]]
    ) -> None:
        """Copy whole pages (source, target), of KV and of group inputs, not more of these than of
        those; no page is both a source and a target."""
        width = self.buckets.decode[-1]
        for start in range(0, len(copies), width):
            kv, inputs = (_pairs(c[start : start + width], width) for c in (copies, input_copies))
            self.caches = self._call("copy_pages", (), self.caches, kv, inputs)

    def store_states(self, moves: list[tuple[int, int]]) -> Array:
        """Pack native slots into compressed ones, at most MOVES pairs (native, compressed); the
        result is ready when that is done."""
        args = (self.caches, self.compressed, self._maps, *_pairs(moves, MOVES))
        self.compressed, done = self._call("store_states", (), *args)
        return done

    def load_states(self, moves: list[tuple[int, int]], *, keep: bool) -> None:
        """Restore compressed slots into native ones, pairs (compressed, native). What the
        checkpoint omits becomes zero, or stays as it is with `keep`."""
        name = "load_states-keep" if keep else "load_states-zero"
        for start in range(0, len(moves), MOVES):
            pairs = _pairs(moves[start : start + MOVES], MOVES)
            self.caches = self._call(name, (), self.caches, self.compressed, self._maps, *pairs)

    def take_pages(self, kind: PageKind, pages: np.ndarray) -> Any:
        """Copies of pages, padded to a chunk's rows, or of one state, on their way to pinned host
        memory."""
        at = np.full(1 if kind == "states" else padded_rows(len(pages)), -1, np.int32)
        at[: len(pages)] = pages
        rows = self._call(f"take-{kind}", at.shape, self.caches, at)
        return jax.device_put(rows, self._placed(kind, "pinned_host"))

    def to_device(self, kind: PageKind, chunks: list[Any]) -> list[Any]:
        """What `take_pages` gave, on its way back."""
        return jax.device_put(chunks, [self._placed(kind, "device")] * len(chunks))

    def put_pages(self, kind: PageKind, rows: Any, pages: np.ndarray) -> None:
        """Rows on the device into pages of the pools, -1: nowhere."""
        self.caches = self._call(f"put-{kind}", pages.shape, self.caches, rows, pages)

    def _placed(self, kind: PageKind, memory: str) -> Any:
        def one(spec: PartitionSpec) -> NamedSharding:
            return NamedSharding(self.mesh, spec, memory_kind=memory)

        return jax.tree.map(one, self._rows[kind], is_leaf=lambda x: isinstance(x, PartitionSpec))

    def set_row(self, row: int, values: RowParams) -> None:
        self.rows = self._call("set_row", (), self.rows, np.int32(row), values)

    def set_seen(self, row: int, in_prompt: np.ndarray, counts: np.ndarray) -> None:
        self.rows = self._call("set_seen", (), self.rows, np.int32(row), in_prompt, counts)

    def wait(self) -> None:
        """Until the device has done all that was dispatched to the caches, packing included."""
        jax.block_until_ready((self.caches, self.compressed))

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    def pool_bytes(self) -> dict[str, int]:
        """Bytes of each pool over all ranks."""
        c = self.caches
        values = 0 if c.values is None else c.values.nbytes
        sizes = {
            "kv_pages": c.keys.nbytes + values,
            "native_slots": c.recurrent.nbytes + c.conv.nbytes,
        }
        if self.compressed is not None:
            sizes["compressed_slots"] = sum(x.nbytes for x in jax.tree.leaves(self.compressed))
        if c.group_inputs is not None:
            sizes["group_inputs"] = sum(x.nbytes for x in jax.tree.leaves(c.group_inputs))
        return sizes

    def compilations(self) -> int:
        """How many shapes have been compiled so far, over all functions."""
        return len(self._executables)

    def warm_up(self, needed: Callable[[str, Shape], bool] | None = None) -> Iterator[str]:
        """Compile every function at every bucket (that is `needed`), several at once; yields what
        is done."""
        work = [call for call in self._warm_up_calls() if needed is None or needed(*call[:2])]

        def compile_one(call: tuple[str, Shape, tuple[Any, ...]]) -> tuple[str, Shape, Any]:
            name, size, args = call
            return name, size, self._compile(name, args)

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = [pool.submit(compile_one, call) for call in work]
            for job in as_completed(jobs):
                name, size, executable = job.result()
                self._executables[name, size] = executable
                yield f"{name} {'x'.join(map(str, size))}"

    def _warm_up_calls(self) -> Iterator[tuple[str, Shape, tuple[Any, ...]]]:
        """Every (function, bucket) with arguments of the right shapes, the slowest first."""
        b, params, caches, rows = self.buckets, self.params, self.caches, self.rows
        for tokens in reversed(b.prefill_tokens):
            for sequences in b.prefill_sequences:
                alone = sequences == b.prefill_sequences[0] and self.prefers_whole_prompt(tokens)
                for whole in (True, False)[not alone :]:
                    batch = self.empty_prefill(tokens, sequences, whole_prompt=whole)
                    size = (tokens, sequences, int(whole))
                    yield "prefill", size, (params, caches, batch)
        if caches.group_inputs is not None:
            for tokens in b.replay_tokens:
                yield "replay", (tokens,), (params, caches, self.empty_replay(tokens))
        last_token = rows.params.last_token
        for size in b.decode:
            padding = np.full(size, -1, np.int32)
            args = (params, caches, last_token, padding, self.empty_decode(size))
            yield "decode", (size,), args
        for size in sorted({*b.prefill_sequences, *b.decode}):
            for mode in SampleMode:
                args = (params, rows, self.hidden_shape(size), np.full(size, -1, np.int32))
                yield f"draw-{mode.name}", (size,), args
        for tokens in b.prefill_tokens:
            targets = np.zeros(tokens, np.int32)
            yield "prompt_logprobs", (tokens,), (params, self.hidden_shape(tokens), targets)
        row = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), rows)
        pairs, zero = np.full(b.decode[-1], -1, np.int32), np.int32(0)
        yield "copy_pages", (), (caches, (pairs, pairs), (pairs, pairs))
        for kind in self._host_kinds:
            for size in (1,) if kind == "states" else CHUNK_ROWS:
                at = np.full(size, -1, np.int32)
                rows_of = jax.tree.map(
                    lambda pool, place, n=size: jax.ShapeDtypeStruct(
                        (n, *pool.shape[1:]), pool.dtype, sharding=place
                    ),
                    pools(caches, kind),
                    self._placed(kind, "device"),
                )
                yield f"take-{kind}", (size,), (caches, at)
                yield f"put-{kind}", (size,), (caches, rows_of, at)
        if self.compressed is not None:
            moves = (caches, self.compressed, self._maps, *_pairs([], MOVES))
            for name in ("store_states", "load_states-zero", "load_states-keep"):
                yield name, (), moves
        yield "set_row", (), (rows, zero, row.params)
        yield "set_seen", (), (rows, zero, row.in_prompt, row.counts)

    def warm_up_steps(self) -> int:
        return sum(1 for _ in self._warm_up_calls())

    def hidden_shape(self, size: int) -> jax.ShapeDtypeStruct:
        width, dtype = self.config.hidden_size, self.params.embedding.dtype
        return jax.ShapeDtypeStruct((size, width), dtype, sharding=self._replicated)

    def prefers_whole_prompt(self, tokens: int) -> bool:
        """Whether a step of one whole prompt in this bucket has a program of its own."""
        full = self.config.full
        if not isinstance(full, AttentionConfig):
            return False
        room, dtype = self.buckets.pages * self.page_size, self.params.embedding.dtype
        return prefers_whole_prompt(tokens, room, full.head_dim, full.head_dim, dtype)

    def empty_prefill(
        self, tokens: int, sequences: int, *, whole_prompt: bool = False
    ) -> PrefillBatch:
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
            input_slots=self._no_input_slots(tokens),
            whole_prompt=whole_prompt,
        )

    def empty_replay(self, tokens: int) -> ReplayBatch:
        return ReplayBatch(
            token_ids=_host(np.zeros(tokens, np.int32)),
            input_slots=_host(np.full(tokens, -1, np.int32)),
            segments=Segments(
                _host(np.zeros(MAX_REPLAYS + 1, np.int32)),
                _host(np.full(MAX_REPLAYS, NO_SLOT, np.int32)),
                _host(np.full(MAX_REPLAYS, NO_SLOT, np.int32)),
            ),
        )

    def _no_input_slots(self, size: int) -> Any:
        return None if self.caches.group_inputs is None else np.full(size, -1, np.int32)

    def empty_decode(self, size: int) -> DecodeBatch:
        return DecodeBatch(
            token_ids=_host(np.zeros(size, np.int32)),
            positions=_host(np.full(size, -1, np.int32)),
            kv_slots=_host(np.full(size, -1, np.int32)),
            page_table=_host(np.full((size, self.buckets.pages), -1, np.int32)),
            state_slots=_host(np.full(size, NO_SLOT, np.int32)),
            input_slots=self._no_input_slots(size),
        )


def _store(
    caches: Caches, pool: CompressedPool, maps: MoveMaps, source: Array, target: Array
) -> tuple[CompressedPool, Array]:
    """Packed states, and something small that can be waited for when the pool is donated again."""
    return store(caches, pool, maps, source, target), jnp.max(target)


def _pairs(moves: list[tuple[int, int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets as arrays of a fixed width, -1 where there is nothing to do."""
    pairs = np.full((2, width), -1, np.int32)
    if moves:
        pairs[:, : len(moves)] = np.array(moves, np.int32).T
    return pairs[0], pairs[1]
