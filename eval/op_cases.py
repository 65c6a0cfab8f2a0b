"""Cases of the suite `kernels` beside the delta rule: packing, short convolution, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import causal_conv1d, ragged_pack
from pallas_kernels.causal_conv1d import decode as conv_decode
from pallas_kernels.causal_conv1d import prefill as conv_prefill
from pallas_kernels.causal_conv1d.tuning import ConvTuning
from pallas_kernels.ragged import NO_SLOT, Segments
from pallas_kernels.ragged_pack import PackedStates
from pallas_kernels.ragged_pack import kernel as pack_kernel
from pallas_kernels.ragged_pack.kernel import PackTuning

from .experts_case import ExpertsCase
from .op_case import OpCase


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
