"""Model configuration: frozen, validated once, everything derived is a property.

The layer list is the truth: each layer says which mixer and which feed-forward block it has.
Families differ only in the values here; `jhybrid.hf_config` reads them from a Hugging Face config.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from .horizons import DecayBias, HorizonDistribution

MixerKind = Literal["linear", "full"]
FeedForwardKind = Literal["mlp", "moe"]
NormPlacement = Literal["pre", "post"]
Activation = Literal["silu", "situ"]


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Raise ValueError naming the field, its value and what was expected."""
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {value!r}")


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Gated DeltaNet (`gdn`, a decay per value head) or Kimi Delta Attention (`kda`, per channel).

    `gate` "softplus": g = -exp(A_log) softplus(z + dt_bias); "safe": g = lower_bound *
    sigmoid(exp(A_log) (z + dt_bias)). `beta_scale` 2 allows negative eigenvalues (OLMo-Hybrid).
    `low_rank` is the inner width of KDA's decay gate; `gate_low_rank` that of its output gate,
    None for a full-rank one. `horizons` says how random weights decay.
    """

    kind: Literal["gdn", "kda"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    gate: Literal["softplus", "safe"] = "softplus"
    gate_lower_bound: float = -5.0
    beta_scale: float = 1.0
    norm_eps: float = 1e-6
    low_rank: int | None = None
    gate_low_rank: int | None = None
    horizons: HorizonDistribution | None = None

    def __post_init__(self) -> None:
        heads = self.value_heads
        require(
            self.key_heads > 0 and heads % self.key_heads == 0,
            "value_heads",
            heads,
            f"a multiple of key_heads ({self.key_heads})",
        )
        require(self.conv_size >= 2, "conv_size", self.conv_size, "at least 2")
        if self.kind == "kda":
            require(heads == self.key_heads, "value_heads", heads, f"key_heads ({self.key_heads})")
            require(self.low_rank is not None, "low_rank", self.low_rank, "a width for KDA")

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def conv_width(self) -> int:
        """Convolved channels of one key head: its q, its k and the v of its value heads."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def decay_width(self) -> int:
        """Log-decays per value head: 1 (GDN) or key_dim (KDA)."""
        return self.key_dim if self.kind == "kda" else 1

    @property
    def decay_bias(self) -> DecayBias | Literal["decay_bias"]:
        """The initialiser of random `dt_bias`."""
        if self.horizons is None:
            return "decay_bias"
        return DecayBias(self.horizons, self.kind == "kda", self.gate, self.gate_lower_bound)


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention with grouped queries. `rotary_dim` 0 means no positional encoding."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    rope_theta: float = 1e4
    output_gate: bool = False
    qk_norm: Literal["head", "full"] | None = None

    def __post_init__(self) -> None:
        require(
            self.kv_heads > 0 and self.heads % self.kv_heads == 0,
            "heads",
            self.heads,
            f"a multiple of kv_heads ({self.kv_heads})",
        )
        require(
            0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            "rotary_dim",
            self.rotary_dim,
            f"an even number up to head_dim ({self.head_dim})",
        )


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention without rotation; the cache holds `latent_dim + shared_dim`."""

    heads: int
    latent_dim: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    query_low_rank: int | None = None
    output_gate: bool = False
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Channels of one head's query: those of its own key and those all heads share."""
        return self.nope_dim + self.shared_dim

    @property
    def cache_dim(self) -> int:
        """Values that the cache keeps of one token, for all heads together."""
        return self.latent_dim + self.shared_dim


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts. `latent_width`: experts work in a down-projected space (Kimi-K3).

    Sigmoid scoring selects by score + bias and weighs by the score alone. `groups` above 1 selects
    among the experts of the best `top_groups`.
    """

    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    shared_gate: bool
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    latent_width: int | None = None
    latent_norm: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require(
            0 < self.top_k <= self.experts, "top_k", self.top_k, f"1 to experts ({self.experts})"
        )
        require(
            self.experts % self.groups == 0, "groups", self.groups, f"a divisor of {self.experts}"
        )
        selectable = self.experts // self.groups * self.top_groups
        require(
            0 < self.top_groups <= self.groups and selectable >= self.top_k,
            "top_groups",
            self.top_groups,
            f"1 to groups ({self.groups}), with {self.top_k} experts among them",
        )


@dataclass(frozen=True)
class LayerConfig:
    mixer: MixerKind
    feed_forward: FeedForwardKind = "mlp"
    norm: NormPlacement = "pre"


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid model. `layers` lists every layer; the 3:1 pattern is only one way to fill it."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    linear: LinearAttentionConfig
    full: AttentionConfig | LatentAttentionConfig
    mlp_width: int
    moe: MoEConfig | None = None
    activation: Activation = "silu"
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_context: int = 4096
    residual_block: int | None = None  # Kimi-K3 attention residuals: layers per stored block

    def __post_init__(self) -> None:
        require(len(self.layers) > 0, "layers", self.layers, "at least one layer")
        has_moe = any(layer.feed_forward == "moe" for layer in self.layers)
        require(not has_moe or self.moe is not None, "moe", self.moe, "a MoEConfig for MoE layers")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == "linear")

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == "full")

    @property
    def cache_heads(self) -> int:
        """Heads of the KV cache: the kv heads, or the single latent."""
        return self.full.kv_heads if isinstance(self.full, AttentionConfig) else 1

    def tensor_parallel_sizes(self) -> list[int]:
        """The sizes of a tensor-parallel mesh that divide every sharded axis.

        KV heads are replicated where there are more ranks than heads, so a size may be a divisor
        or a multiple of their number.
        """
        axes = [self.full.heads, self.linear.key_heads, self.vocab_size, self.mlp_width]
        if self.moe is not None:
            axes += [self.moe.expert_width] + ([self.moe.shared_width] or [])
        sizes = [n for n in _divisors(math.gcd(*axes)) if n <= self.full.heads]
        if isinstance(self.full, AttentionConfig):
            kv = self.full.kv_heads
            sizes = [n for n in sizes if kv % n == 0 or n % kv == 0]
        return sizes

    def for_tensor_parallel(self, tp: int) -> ModelConfig:
        """This model as a mesh of `tp` ranks runs it: KV heads repeated when `tp` exceeds them."""
        sizes = self.tensor_parallel_sizes()
        require(tp in sizes, "tp", tp, f"one of {sizes}, which divide this model")
        if isinstance(self.full, AttentionConfig) and tp > self.full.kv_heads:
            return replace(self, full=replace(self.full, kv_heads=tp))
        return self


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
