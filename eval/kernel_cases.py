"""Cases of the suite `kernels`: gated delta rule over published head shapes and batch layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape
from pallas_kernels.gated_delta_rule import Gates
from pallas_kernels.ragged import NO_SLOT, Segments

CACHE_BYTES = 100e6  # rotate over at least this much; twice the L2 cache of the device


class Data(NamedTuple):
    """Inputs of one call and the slots of its sequences."""

    qkv: jax.Array
    gates: Gates
    slots: jax.Array


@dataclass(frozen=True)
class KernelCase:
    """`sequences` of `length` tokens each; length 1 is a decode step."""

    shape: HeadShape
    sequences: int
    length: int

    @property
    def decode(self) -> bool:
        return self.length == 1

    @property
    def name(self) -> str:
        s = self.shape
        kind, _, heads = s.name.partition("-")
        layout = f"{self.sequences}" if self.decode else f"{self.sequences}x{self.length}"
        return f"{kind}_{'decode' if self.decode else 'prefill'}/{heads}/{layout}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def state_bytes(self) -> int:
        s = self.shape
        return 4 * self.sequences * s.heads * s.key_dim * s.value_dim

    @property
    def input_bytes(self) -> int:
        leaves = jax.tree.leaves(self.shape.inputs(self.tokens))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    @property
    def floor_bytes(self) -> int:
        """Every input read once, outputs written once, states read and written once."""
        s = self.shape
        outputs = 2 * self.tokens * s.heads * s.value_dim
        return self.input_bytes + outputs + 2 * self.state_bytes

    def floor_seconds(self, copy_rate: float, matrix_rate: float) -> float:
        """Bound by bytes; the products of a chunked form are its own choice, and not counted."""
        return self.floor_bytes / copy_rate

    @property
    def sets(self) -> int:
        """How many input sets to rotate over. A short step needs many to fill a CUDA graph."""
        touched = self.input_bytes + (self.state_bytes if self.decode else 0)
        most = 16 if jax.default_backend() == "gpu" else 2
        return int(np.clip(np.ceil(CACHE_BYTES / touched), 2, most))

    def data(self, seed: int) -> Data:
        """Random inputs on the device; decays as trained models have them, from fast to none."""
        keys = jax.random.split(jax.random.key(seed), 4)
        shape, gates = self.shape.inputs(self.tokens)
        qkv = jax.random.normal(keys[0], shape.shape, shape.dtype)
        logits = jax.random.uniform(keys[1], gates.decay.shape, jnp.float32, -7.0, 1.0)
        gates = Gates(
            logits,
            jax.random.normal(keys[2], gates.beta.shape),
            jnp.zeros(gates.A_log.shape),
            0.3 * jax.random.normal(keys[3], gates.dt_bias.shape),
        )
        slots = jnp.arange(self.sequences, dtype=jnp.int32) + seed * self.sequences
        return Data(qkv, gates, slots)

    def pool(self) -> jax.Array:
        """Slots for every set, and one that nobody owns."""
        shape = self.shape.pool(self.sets * self.sequences + 1)
        return jax.random.normal(jax.random.key(99), shape.shape, shape.dtype)

    def segments(self, slots: jax.Array) -> Segments:
        """One segment a sequence, and one unused."""
        cu = jnp.arange(self.sequences + 1, dtype=jnp.int32) * self.length
        return Segments(
            jnp.append(cu, cu[-1]), jnp.append(slots, NO_SLOT), jnp.append(slots, NO_SLOT)
        )


def delta_rule_cases() -> list[KernelCase]:
    """Prefill and decode over the layouts that peers publish; those that decide come first, since
    a run may be cut short."""
    gdn, kda, wide, olmo = (
        HEAD_SHAPES[name]
        for name in ("gdn-16x32x128", "kda-32x32x128", "gdn-16x48x128", "gdn-30x30x96x192")
    )
    both = (gdn, kda)
    cases = [KernelCase(shape, 1, 8192) for shape in both]
    cases += [KernelCase(shape, n, 1) for shape in both for n in (1, 128, 256, 32)]
    # 32 tokens, a question behind a hit, have a kernel of their own
    layouts = ((1, 2048), (8, 1024), (4, 8192), (1, 32768), (1, 32), (4, 8))
    cases += [KernelCase(shape, *layout) for layout in layouts for shape in both]
    cases += [KernelCase(wide, 1, length) for length in (2048, 8192, 32768)]
    return [*cases, KernelCase(olmo, 1, 8192)]


def tiny_cases() -> list[KernelCase]:
    """For a dry run in interpret mode."""
    gdn = HeadShape("gdn-1x2x32", 1, 2, 32, 32)
    kda = HeadShape("kda-2x2x32", 2, 2, 32, 32, per_channel=True)
    return [KernelCase(s, n, t) for s in (gdn, kda) for n, t in ((2, 70), (2, 1), (3, 9))]


def relative_rms(value: Any, reference: Any) -> float:
    """Computed on the device; inf where the value is not finite."""
    value, reference = value.astype(jnp.float32), reference.astype(jnp.float32)
    error = jnp.sqrt(jnp.mean(jnp.square(value - reference)))
    ratio = float(error / jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(reference))), 1e-30))
    return ratio if np.isfinite(ratio) else float("inf")
