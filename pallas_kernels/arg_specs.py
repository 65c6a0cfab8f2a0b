"""Head shapes of published models, shared by tests, compile checks and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .gated_delta_rule import Gates
from .ragged import Segments


@dataclass(frozen=True)
class HeadShape:
    name: str
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool = False

    @property
    def width(self) -> int:
        """Packed channels of a key head."""
        return 2 * self.key_dim + self.heads // self.key_heads * self.value_dim

    def inputs(
        self, tokens: int, dtype: DTypeLike = jnp.bfloat16
    ) -> tuple[jax.ShapeDtypeStruct, Gates]:
        """qkv, gates."""
        channels = (self.key_dim,) if self.per_channel else ()

        def gate(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        gates = Gates(
            gate(tokens, self.heads, *channels),
            gate(tokens, self.heads),
            gate(self.heads),
            gate(self.heads, *channels),
        )
        return jax.ShapeDtypeStruct((tokens, self.key_heads, self.width), dtype), gates

    def pool(self, slots: int, layers: int = 1) -> jax.ShapeDtypeStruct:
        shape = (slots, layers, self.heads, self.key_dim, self.value_dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32)


HEAD_SHAPES = {
    shape.name: shape
    for shape in (
        HeadShape("gdn-16x32x128", 16, 32, 128, 128),  # Qwen3.5-4B
        HeadShape("gdn-16x48x128", 16, 48, 128, 128),  # Qwen3.6-27B
        HeadShape("kda-32x32x128", 32, 32, 128, 128, per_channel=True),  # Kimi-Linear
        HeadShape("gdn-30x30x96x192", 30, 30, 96, 192),  # OLMo-Hybrid
    )
}


@dataclass(frozen=True)
class AttentionShape:
    """`latent` keys serve as values too, in their first `value_dim` entries."""

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    def queries(self, tokens: int, dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, self.heads, self.key_dim), dtype)

    def pages(
        self, count: int, layers: int, size: int, dtype: DTypeLike = jnp.bfloat16
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
        """Keys and values."""
        lead = (count, layers, size, self.kv_heads)
        keys = jax.ShapeDtypeStruct((*lead, self.key_dim), dtype)
        return keys, None if self.latent else jax.ShapeDtypeStruct((*lead, self.value_dim), dtype)


ATTENTION_SHAPES = {
    shape.name: shape
    for shape in (
        AttentionShape("gqa-16x4x256", 16, 4, 256, 256),  # Qwen3.5-4B
        AttentionShape("gqa-24x4x256", 24, 4, 256, 256),  # Qwen3.6-27B
        AttentionShape("gqa-30x30x128", 30, 30, 128, 128),  # OLMo-Hybrid
        AttentionShape("mla-32x576x512", 32, 1, 576, 512, latent=True),  # Kimi-Linear
        AttentionShape("mla-96x576x512", 96, 1, 576, 512, latent=True),  # Kimi-K3
    )
}


def segments_shape(count: int) -> Segments:
    """Abstract segments, for lowering without data."""
    cu: Any = jax.ShapeDtypeStruct((count + 1,), jnp.int32)
    one: Any = jax.ShapeDtypeStruct((count,), jnp.int32)
    return Segments(cu, one, one)
