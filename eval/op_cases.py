"""Cases of the suite `kernels` beside the delta rule: packing, short convolution, experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import causal_conv1d, grouped_matmul, ragged_pack
from pallas_kernels.causal_conv1d import decode as conv_decode
from pallas_kernels.causal_conv1d import prefill as conv_prefill
from pallas_kernels.causal_conv1d.tuning import ConvTuning
from pallas_kernels.grouped_matmul import kernel as matmul_kernel
from pallas_kernels.grouped_matmul.tuning import MatmulTuning
from pallas_kernels.ragged import NO_SLOT, Segments
from pallas_kernels.ragged_pack import PackedStates
from pallas_kernels.ragged_pack import kernel as pack_kernel
from pallas_kernels.ragged_pack.kernel import PackTuning

from .device_time import Loop
from .kernel_cases import relative_rms
from .variant import Variant


class OpCase(ABC):
    """One op at one size. `sets` are inputs to rotate over; `state` is what a call updates."""

    bound: ClassVar[float] = 5e-3  # relative RMS
    operations: int = 0

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def floor_bytes(self) -> int:
        """Every input that counts read once, every result written once."""

    @abstractmethod
    def sets(self) -> list[Any]: ...

    @abstractmethod
    def state(self) -> Any: ...

    @abstractmethod
    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """(outputs, state) by `implementation`, or by `tuning` from the kernel itself."""

    @abstractmethod
    def tunings(self) -> list[Any]:
        """Worth timing, the default first."""

    def floor_seconds(self, copy_rate: float, matrix_rate: float) -> float:
        return max(self.floor_bytes / copy_rate, self.operations / matrix_rate)

    def expected(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        return self.step(state, inputs, implementation="xla")

    def compared(self, results: Any) -> Any:
        return results

    def check(self, interpret: bool) -> float:
        """The largest relative RMS over the results, against the XLA form."""
        inputs, state = self.sets()[0], self.state()
        options = {"implementation": "pallas", "interpret": interpret}
        found = self.compared(jax.jit(lambda c, x: self.step(c, x, **options))(state, inputs))
        expected = self.compared(jax.jit(self.expected)(state, inputs))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return max(relative_rms(a, b) for a, b in pairs)

    def loop(self, arm: str, expected: float, interpret: bool) -> Loop | None:
        """None where the arm does not serve the case."""
        if arm not in ("pallas", "xla"):
            return None
        return self._loop(expected, implementation=arm, interpret=interpret and arm == "pallas")

    def _loop(self, expected: float, **options: Any) -> Loop:
        return Loop(lambda c, x: self.step(c, x, **options), self.sets(), self.state(), expected)

    def variants(self, interpret: bool) -> list[Variant]:
        expected = 2 * self.floor_seconds(4e12, 7e14)
        tunings = list(dict.fromkeys(self.tunings()))

        def make(tuning: Any) -> Callable[[], Loop]:
            return lambda: self._loop(expected, tuning=tuning, interpret=interpret)

        return [Variant("op", t, tunings[0], make(t)) for t in tunings[: 2 if interpret else None]]


@dataclass(frozen=True)
class PackCase(OpCase):
    """Half of the rows of a batch of whole-model checkpoints; the default is Kimi-Linear's size."""

    move: Literal["pack", "unpack-zero", "unpack-keep"]
    int8: bool = False
    layers: int = 20
    heads: int = 32
    width: int = 128  # of keys and of values
    batch: int = 8

    @property
    def name(self) -> str:
        size = f"{self.layers}x{self.heads}x{self.width}x{self.width}"
        return f"{self.move}/{'int8' if self.int8 else 'f32'}/{size}/{self.batch}"

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Copies are exact. Quantised, a value between two steps may fall on either."""
        return 1e-3 if self.int8 else 0.0

    @property
    def count(self) -> int:
        return self.layers * self.heads * self.width

    @property
    def floor_bytes(self) -> int:
        native = 4 * self.width
        packed = self.width + 4 if self.int8 else native
        kept = self.count // 2
        written = {"pack": kept * packed, "unpack-zero": self.count * native}
        read = kept * (packed if self.move.startswith("unpack") else native)
        return self.batch * (read + written.get(self.move, kept * native))

    def rows(self) -> Array:
        chosen = np.random.default_rng(0).permutation(self.count)[: self.count // 2]
        return jnp.asarray(np.sort(chosen), jnp.int32)

    def pool(self) -> Array:
        shape = (2 * self.batch, self.layers, self.heads, self.width, self.width)
        return jax.random.normal(jax.random.key(0), shape)

    def packed(self) -> PackedStates:
        shape = (2 * self.batch, self.count // 2, self.width)
        if not self.int8:
            return PackedStates(jax.random.normal(jax.random.key(1), shape), None)
        values = jax.random.randint(jax.random.key(1), shape, -127, 128, jnp.int8)
        return PackedStates(values, jax.random.uniform(jax.random.key(2), shape[:2]))

    def sets(self) -> list[Any]:
        rows = self.rows()
        halves = jnp.arange(2 * self.batch, dtype=jnp.int32).reshape(2, -1)
        whole = self.pool() if self.move == "pack" else self.packed()
        positions = ragged_pack.row_positions(rows, self.count)
        return [(whole, rows, positions, halves[n], halves[1 - n]) for n in range(2)]

    def state(self) -> Any:
        return self.packed() if self.move == "pack" else self.pool()

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        whole, rows, positions, source, target = inputs
        op: Any = pack_kernel if "tuning" in options else ragged_pack
        slots = (rows, source, target)
        if self.move == "pack":
            return (), op.pack_states(whole, state, *slots, **options)
        if self.move == "unpack-zero":
            options["positions"] = positions
        omitted = self.move.removeprefix("unpack-")
        return (), op.unpack_states(whole, state, *slots, omitted=omitted, **options)

    def compared(self, results: Any) -> Any:
        """Quantised, what comes back: steps near a half may fall on either side."""
        _, state = results
        if not isinstance(state, PackedStates) or state.scales is None:
            return state
        return state.values.astype(jnp.float32) * state.scales[..., None]

    def tunings(self) -> list[Any]:
        sizes = ((32, 4), (16, 4), (64, 4), (64, 8), (16, 2), (8, 1))
        return [PackTuning(rows, warps) for rows, warps in sizes]


@dataclass(frozen=True)
class ConvCase(OpCase):
    """`length` 1 is a decode step; the default is Qwen3.5-4B's, with what lies beside."""

    sequences: int
    length: int
    heads: int = 16
    width: int = 512
    beside: int = 256
    taps: int = 4

    @property
    def channels(self) -> int:
        return self.heads * self.width

    @property
    def decode(self) -> bool:
        return self.length == 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def name(self) -> str:
        layout = f"{self.sequences}" if self.decode else f"{self.sequences}x{self.length}"
        return f"conv_{'decode' if self.decode else 'prefill'}/{self.channels}/{layout}"

    @property
    def floor_bytes(self) -> int:
        windows = 2 * self.sequences * (self.taps - 1)
        return 2 * self.channels * (2 * self.tokens + windows + self.taps)

    def sets(self) -> list[Any]:
        out = []
        for seed in range(max(2, min(16, 100_000_000 // self.floor_bytes))):
            x, w = jax.random.split(jax.random.key(seed))
            slots = jnp.arange(self.sequences, dtype=jnp.int32) + seed * self.sequences
            shape = (self.tokens, self.heads, self.width + self.beside)
            weight = jax.random.normal(w, (self.heads, self.width, self.taps), jnp.bfloat16)
            out.append((jax.random.normal(x, shape, jnp.bfloat16), weight, slots))
        return out

    def state(self) -> Any:
        slots = 16 * self.sequences
        shape = (slots, 1, self.taps - 1, self.channels)
        return jax.random.normal(jax.random.key(99), shape, jnp.bfloat16)

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        (x, weight, slots), tuned = inputs, "tuning" in options
        if self.decode:
            op: Any = conv_decode.decode if tuned else causal_conv1d.decode_causal_conv1d
            return op(x, weight, state, 0, slots, **options)
        cu = jnp.arange(self.sequences + 1, dtype=jnp.int32) * self.length
        slots = jnp.append(slots, NO_SLOT)
        op = conv_prefill.ragged_prefill if tuned else causal_conv1d.ragged_causal_conv1d
        return op(x, weight, state, 0, Segments(jnp.append(cu, cu[-1]), slots, slots), **options)

    def expected(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        x, *others = inputs
        return self.step(state, (x.astype(jnp.float32), *others), implementation="xla")

    def tunings(self) -> list[Any]:
        if self.decode:
            default = ConvTuning.decode(self.sequences)
            sizes = ((256, 1, 1), (128, 1, 1), (256, 1, 2), (256, 1, 4), (512, 2, 1), (512, 2, 4))
            return [default, *(ConvTuning(c, w, sequences=n) for c, w, n in sizes)]
        blocks, cuts = ((256, 1), (128, 1)), ((64, 8), (128, 8), (64, 4), (64, 16))
        sizes = [(*block, *cut) for block in blocks for cut in cuts]
        return [ConvTuning(), *(ConvTuning(*size) for size in sizes)]


@dataclass(frozen=True)
class ExpertsCase(OpCase):
    """One of the two products of an expert layer; the default is Qwen3.5-35B-A3B's."""

    product: Literal["gate_up", "down"]
    tokens: int
    hidden: int = 2048
    inner: int = 512
    experts: int = 256
    chosen: int = 8

    @property
    def name(self) -> str:
        sizes = f"{self.chosen}of{self.experts}x{self.inner}x{self.hidden}"
        return f"experts_{self.product}/{sizes}/{self.tokens}"

    @property
    def _widths(self) -> tuple[int, int, int]:
        """(inputs, rows of a matrix, results)"""
        if self.product == "gate_up":
            return self.hidden, 2 * self.inner, self.inner
        return self.inner, self.hidden, self.hidden

    @property
    def count(self) -> int:
        return self.tokens * self.chosen

    @property
    def operations(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        width, rows, _ = self._widths
        return 2 * self.count * width * rows

    @property
    def floor_bytes(self) -> int:
        width, rows, results = self._widths
        used = np.mean([np.count_nonzero(self._routed(n)[0]) for n in range(self._rotated)])
        read = self.tokens if self.product == "gate_up" else self.count
        return int(2 * (used * rows * width + read * width + self.count * results))

    @property
    def _rotated(self) -> int:
        return 2 if self.tokens > 256 else 8

    def _routed(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each expert, and the token of each row."""
        rng = np.random.default_rng(seed)
        scores = rng.random((self.tokens, self.experts))
        flat = np.argpartition(scores, self.chosen)[:, : self.chosen].ravel()
        sizes = np.bincount(flat, minlength=self.experts)
        return sizes.astype(np.int32), np.argsort(flat, kind="stable").astype(np.int32)

    def sets(self) -> list[Any]:
        width, rows, _ = self._widths
        shape = (self.experts, rows, width)
        if self.product == "gate_up":
            shape = (self.experts, 2, self.inner, width)
        w = jax.random.normal(jax.random.key(99), shape, jnp.bfloat16) * width**-0.5
        w = w.astype(jnp.bfloat16)  # one copy, for every set
        out = []
        for seed in range(self._rotated):
            sizes, order = map(jnp.asarray, self._routed(seed))
            source = order // self.chosen if self.product == "gate_up" else None
            given = self.count if source is None else self.tokens
            x = jax.random.normal(jax.random.key(seed), (given, width), jnp.bfloat16)
            out.append((x, w, sizes, source))
        return out

    def state(self) -> Any:
        return ()

    def step(self, state: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
        x, w, sizes, source = inputs
        op: Any = matmul_kernel.grouped_matmul if "tuning" in options else grouped_matmul
        combine = _swiglu if self.product == "gate_up" else None
        options.setdefault("dtype", jnp.bfloat16)
        return op(x, w, sizes, rows=source, combine=combine, **options), state

    def expected(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        return self.step(state, inputs, implementation="xla", dtype=jnp.float32)

    def tunings(self) -> list[Any]:
        default = MatmulTuning.default(self.count, self.experts, jnp.bfloat16)
        if self.count > 8 * self.experts:
            sizes: Any = (
                (128, 128, 64, 4, 3, True),  # two programs a multiprocessor
                (128, 128, 64, 8, 3, True),
                (128, 256, 32, 8, 4, True),
                (128, 256, 64, 8, 4, True),
                (128, 256, 64, 8, 3),
                (64, 256, 32, 4, 4),
            )
        else:
            sizes = (
                (16, 32, 128, 4, 4),
                (16, 32, 256, 4, 4),
                (16, 64, 256, 4, 3),
                (16, 64, 128, 8, 4),
                (16, 128, 64, 4, 4),
                (16, 128, 128, 8, 4),
                (16, 64, 128, 4, 6),
            )
        return [default, *(MatmulTuning(*size) for size in sizes)]


def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def op_cases() -> list[OpCase]:
    moves: tuple[Any, ...] = ("pack", "unpack-zero", "unpack-keep")
    cases: list[OpCase] = [PackCase(move, int8) for move in moves for int8 in (False, True)]
    cases += [ConvCase(1, 8192), ConvCase(8, 1024)]
    cases += [ConvCase(n, 1) for n in (1, 32, 256)]
    products: tuple[Any, ...] = ("gate_up", "down")
    return cases + [ExpertsCase(p, n) for n in (8192, 16, 4, 1) for p in products]


def tiny_op_cases() -> list[OpCase]:
    moves: tuple[Any, ...] = ("pack", "unpack-zero", "unpack-keep")
    cases: list[OpCase] = [PackCase(m, int8, 1, 2, 32, 2) for m in moves for int8 in (False, True)]
    cases += [
        ConvCase(2, 40, 2, 32, 16),
        ConvCase(2, 1, 2, 32, 16),
    ]
    products: tuple[Any, ...] = ("gate_up", "down")
    return cases + [ExpertsCase(p, n, 64, 32, 4, 2) for n in (30, 2) for p in products]
