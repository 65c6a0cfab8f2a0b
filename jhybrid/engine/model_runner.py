"""The device side of the engine: it owns parameters, caches and sampler rows, and runs the steps.

`ModelRunner` replaces what it donates to a call with what the call returns. It knows shapes, not
requests. Calls return at once; results are read later. What a call takes from the host may be numpy
arrays or, from `stage`, arrays that are on their way already: the executables are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels import prefers_whole_prompt

from ..batch import Caches
from ..cache.host_store import padded_rows
from ..config import AttentionConfig, ModelConfig
from ..models.groups import stored_inputs
from ..models.hybrid import Stream
from ..models.pages import PageKind, kv_kinds, rows_partition
from ..models.specs import ModelParams, cache_partition, cache_specs
from ..packed import Packed
from ..params import map_specs, partition_specs
from ..retention.maps import MoveMaps
from ..retention.movers import CompressedPool, compressed_specs
from ..sharding import AXIS, REPLICATED, named_sharding
from .buckets import MOVES, Buckets
from .compression import Compression
from .decode_lines import DecodeLines, Drawn, LinesOnDevice, empty_lines
from .host_moves import put_name
from .host_spans import host_span
from .programs import Programs
from .sampler import Sampled, SampleMode, SamplerRows, init_rows
from .step_functions import compression_functions, host_functions, step_functions


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
        partition = cache_partition(config, group_inputs=input_pages > 0, input_dtype=input_dtype)
        functions = step_functions(config, mesh, partition, page_size, valid_vocab)

        some = input_pages > 0 and stored_inputs(config) > 0  # the only group's may be token ids
        inputs: tuple[PageKind, ...] = ("inputs",) if some else ()
        self.kv_kinds = kv_kinds(len(config.full_layers)) if host else ()
        kinds: tuple[PageKind, ...] = (*self.kv_kinds, *inputs, "states") if host else ()
        self.host_rows: dict[PageKind, Any] = {k: rows_partition(partition, k) for k in kinds}
        functions |= host_functions(mesh, partition, kinds)

        self.compression = compression
        self.compressed: CompressedPool | None = None
        if compression is not None:
            by_rank = NamedSharding(mesh, PartitionSpec(AXIS))
            self.maps: MoveMaps = jax.device_put(compression.maps, by_rank)
            specs = compressed_specs(config, self.maps, compressed_slots, compression.dtype)
            self.compressed = zeros(specs)
            pool = partition_specs(specs)
            functions |= compression_functions(mesh, partition, pool, self.maps)

        self.rows: SamplerRows = jax.device_put(
            init_rows(max_running, config.vocab_size), self._replicated
        )
        self.programs = Programs(functions, mesh.devices.flat[0].platform)
        self._lines = dict[int, LinesOnDevice]()  # of each bucket
        self._hidden = dict[int, Array]()  # likewise, as the last decode left them

    @host_span("send arguments")
    def stage(self, inputs: Any) -> Any:
        """A pytree of numpy arrays on its way to the device. A transfer waits for the programs
        dispatched before it, and may wait for large transfers sent before it."""
        return jax.device_put(inputs, self._replicated)

    def prefill(
        self, batch: Packed, between: Callable[[], None] = lambda: None
    ) -> tuple[Array, Stream]:
        """Run packed prompts (a PrefillBatch); returns the hidden rows of each sequence's last
        token, and the stream that enters the closing layers. `between` is called when the lower
        layers are dispatched."""
        size, args = _prefill_bucket(batch), (self.params, self.caches, batch)
        stream, self.caches = self.programs.call("prefill-lower", size, *args)
        between()
        args = (self.params, self.caches, batch, stream)
        last, stream, self.caches = self.programs.call("prefill-upper", size, *args)
        return last, stream

    def decode(self, wanted: DecodeLines) -> tuple[Array, Array]:
        """Run the last token of each line (which never left the device), a line as
        `LinesOnDevice.bring` takes it. Returns hidden rows, which are gone with the next call, and
        the number of each line's sampler row, to draw with."""
        (size,) = shape = wanted.rows.shape
        if size not in self._lines:
            self._lines[size] = LinesOnDevice(
                self.empty_lines(size), lambda name, *args: self.programs.call(name, shape, *args)
            )
            spec = self.hidden_shape(size)
            self._hidden[size] = self.stage(np.zeros(spec.shape, spec.dtype))
        lines = self._lines[size].bring(wanted)
        args = (self.params, self.caches, self._hidden[size], self.drawn, lines)
        self._hidden[size], self.caches = self.programs.call("decode", shape, *args)
        return self._hidden[size], lines.rows

    def draw(self, hidden: Array, rows: Array, mode: SampleMode) -> Sampled:
        """Sample the next token of each row (-1: padding)."""
        args = (self.params, self.rows, hidden, rows)
        self.rows, out = self.programs.call(f"draw-{mode.name}", rows.shape, *args)
        for leaf in jax.tree.leaves(out):
            leaf.copy_to_host_async()
        return out

    def prompt_logprobs(self, batch: Packed, stream: Stream, targets: Array) -> tuple[Array, ...]:
        """Log-probabilities of `targets` [T] behind the rows of the last prefill, and the best
        ones."""
        size, args = _prefill_bucket(batch), (self.params, self.caches, batch, stream, targets)
        scores, self.caches = self.programs.call("prompt_logprobs", size, *args)
        return scores

    def replay(self, batch: Packed) -> None:
        """Roll states forward over group inputs (a packed ReplayBatch)."""
        args = (self.params, self.caches, batch)
        self.caches = self.programs.call("replay", batch.shapes.token_ids, *args)

    def copy_pages(self, copies: Packed) -> None:
        """Copy whole pages, packed pairs of KV and of group inputs; none is source and target."""
        self.caches = self.programs.call("copy_pages", (), self.caches, copies)

    def store_states(self, moves: list[tuple[int, int]]) -> Array:
        """Pack native slots into compressed ones, at most MOVES pairs (native, compressed); the
        result is ready when that is done."""
        args = (self.caches, self.compressed, self.maps, *pairs(moves, MOVES))
        self.compressed, done = self.programs.call("store_states", (), *args)
        return done

    def load_states(self, moves: tuple[Array, Array], *, keep: bool) -> None:
        """Restore compressed slots into native ones, MOVES pairs (compressed, native). What the
        checkpoint omits becomes zero, or stays as it is with `keep`."""
        name = "load_states-keep" if keep else "load_states-zero"
        args = (self.caches, self.compressed, self.maps, *moves)
        self.caches = self.programs.call(name, (), *args)

    def take_pages(self, kind: PageKind, pages: np.ndarray) -> Any:
        """Copies of pages, padded to a chunk's rows, or of one state, on their way to pinned host
        memory."""
        at = np.full(1 if kind == "states" else padded_rows(len(pages)), -1, np.int32)
        at[: len(pages)] = pages
        rows = self.programs.call(f"take-{kind}", at.shape, self.caches, at)
        return jax.device_put(rows, self.placed(kind, "pinned_host"))

    def to_device(self, kind: PageKind, chunks: list[Any]) -> list[Any]:
        """What `take_pages` gave, on its way back."""
        with host_span(f"send {kind}"):
            return jax.device_put(chunks, [self.placed(kind, "device")] * len(chunks))

    def put_pages(self, kind: PageKind, pages: Array, rows: list[Any]) -> None:
        """Rows on the device into pages of the pools: one call of `put_order`. Where it has places
        for more parts than there are, the first one goes there, too, which is nowhere."""
        some, name = rows + rows[:1] * (len(pages) - len(rows)), put_name(kind, len(pages))
        self.caches = self.programs.call(name, pages.shape, self.caches, some, pages)

    def placed(self, kind: PageKind, memory: str) -> Any:
        """Shardings of the rows of pages in one kind of memory."""

        def one(spec: PartitionSpec) -> NamedSharding:
            return NamedSharding(self.mesh, spec, memory_kind=memory)

        return jax.tree.map(
            one, self.host_rows[kind], is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def set_row(self, values: Packed) -> None:
        """Set a sampler row: its number and its RowParams, packed."""
        self.rows = self.programs.call("set_row", (), self.rows, values)

    def set_seen(self, row: Array, in_prompt: Array, counts: Array) -> None:
        self.rows = self.programs.call("set_seen", (), self.rows, row, in_prompt, counts)

    def wait(self) -> None:
        """Until the device has done all that was dispatched to the caches, packing included."""
        jax.block_until_ready((self.caches, self.compressed))

    @property
    def drawn(self) -> Drawn:
        return Drawn(self.rows.params.last_token, self.rows.params.generated)

    def empty_lines(self, size: int, pages: int | None = None) -> DecodeLines:
        """Lines of a decode step, in numpy, with tables of `pages` or of the widest."""
        pages = self.buckets.pages if pages is None else pages
        return empty_lines(size, pages, group_inputs=self.caches.group_inputs is not None)

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

    def stream_shape(self, tokens: int, layer: int) -> Stream:
        """What enters a layer of a prefill."""
        block = self.config.residual_block
        one: Any = self.hidden_shape(tokens)
        return Stream(one, (one,) * (-(-layer // block) if block else 0))

    def hidden_shape(self, size: int) -> jax.ShapeDtypeStruct:
        width, dtype = self.config.hidden_size, self.params.embedding.dtype
        return jax.ShapeDtypeStruct((size, width), dtype, sharding=self._replicated)

    def prefers_whole_prompt(self, tokens: int) -> bool:
        """Whether a step of one whole prompt in this bucket has a program of its own."""
        room, dtype = self.buckets.pages * self.page_size, self.params.embedding.dtype
        return whole_prompt_pays(self.config, tokens, room, dtype)


def whole_prompt_pays(config: ModelConfig, tokens: int, room: int, dtype: DTypeLike) -> bool:
    """Whether attention has a faster form for a step of one prompt from its first token on."""
    full = config.full
    if not isinstance(full, AttentionConfig):
        return False
    return prefers_whole_prompt(tokens, room, full.head_dim, full.head_dim, dtype)


def _prefill_bucket(batch: Packed) -> tuple[int, ...]:
    """Tokens, sequences, and whether they are one whole prompt."""
    shapes = batch.shapes
    return (*shapes.token_ids, shapes.page_table[0], int(shapes.whole_prompt))


def pairs(moves: list[tuple[int, int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets as arrays of a fixed width, -1 where there is nothing to do."""
    table = np.full((2, width), -1, np.int32)
    if moves:
        table[:, : len(moves)] = np.array(moves, np.int32).T
    return table[0], table[1]
