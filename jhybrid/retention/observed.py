"""What prefixes really do to the state: empirical horizons and state magnitudes (dasc section 3.4).

    H_e = ln(epsilon) / mean_t g_t        over a prefix's tokens            (eq. 4)
    M_S = |S_h|_F of a GDN head, |S_hk|_2 of a KDA key channel, at its end   (eq. 5)

Analysis only: plans are made from weights, never from these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from pallas_kernels import NO_SLOT, Segments
from pallas_kernels.precision import working_dtype

from ..batch import Caches, PrefillBatch
from ..config import LinearAttentionConfig, ModelConfig, require
from ..layers.attention_residuals import mix_residuals
from ..layers.gated_delta_net import GatedDeltaNetParams
from ..layers.kimi_delta_attention import KimiDeltaAttentionParams
from ..layers.linear import project
from ..layers.norm import rms_norm
from ..models.hybrid import forward
from ..models.specs import LayerParams, ModelParams, cache_partition, cache_specs, model_partition
from ..params import map_specs
from ..sharding import AXIS, REPLICATED, named_sharding, sharded

PAGE, SLOT = 64, 1
SHORTEST = 64  # tokens of the smallest compiled shape; larger ones are powers of two


@dataclass(frozen=True, eq=False)
class Observed:
    """Of one prefix, per unit [Ll, H, U] as `Horizons.values`: mean g, and M_S at the end."""

    log_decay: Float[np.ndarray, "Ll H U"]
    magnitude: Float[np.ndarray, "Ll H U"]

    def horizons(self, epsilon: float) -> Float[np.ndarray, "Ll H U"]:
        """H_e in tokens."""
        with np.errstate(divide="ignore"):
            return math.log(epsilon) / self.log_decay


def observe(
    params: ModelParams, config: ModelConfig, mesh: Mesh, prefix: Sequence[int], dtype: Any
) -> Observed:
    """One forward pass over a prefix, independent of any other; states are kept at its end only."""
    require(len(prefix) > 0, "prefix", prefix, "at least one token")
    config = config.for_tensor_parallel(mesh.size)
    size = max(SHORTEST, 2 ** math.ceil(math.log2(len(prefix))))
    batch = _one_prefill(prefix, size)
    caches: Caches = map_specs(
        lambda s: jnp.zeros(s.shape, s.dtype_in(dtype), device=named_sharding(mesh, s.axes)),
        cache_specs(config, size // PAGE, PAGE, SLOT + 1),
    )
    g, norms = _compiled(config, mesh)(params, caches, batch, np.int32(len(prefix)))
    return Observed(np.asarray(g, np.float64), np.asarray(norms, np.float64))


def correlations(
    horizons: Float[np.ndarray, "Ll H U"], signal: Float[np.ndarray, "Ll H U"]
) -> Float[np.ndarray, " Ll"]:
    """Spearman correlation across the units of each layer, as in table 1(b)."""
    pairs = zip(horizons, signal, strict=True)
    return np.array([np.corrcoef(_ranks(a), _ranks(b))[0, 1] for a, b in pairs])


def _ranks(values: Float[np.ndarray, "H U"]) -> Float[np.ndarray, " N"]:
    """Ranks of the flattened values; equal values share their mean rank."""
    _, inverse, counts = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


@functools.lru_cache(maxsize=8)
def _compiled(config: ModelConfig, mesh: Mesh) -> Any:
    """(mean g, M_S), each [Ll, H, U], of one padded prefill and its number of tokens."""

    def run(
        params: ModelParams, caches: Caches, batch: PrefillBatch, length: Array
    ) -> tuple[Array, Array]:
        real, found = jnp.arange(batch.token_ids.shape[0]) < length, list[Array]()

        def observe_layer(layer: LayerParams, x: Array, stored: tuple[Array, ...]) -> None:
            g = _log_decay(layer, x, stored, config)
            if g is not None:
                kept = jnp.where(real[:, None, None], g, 0.0)
                found.append(jnp.sum(kept, axis=0) / length.astype(g.dtype))

        _, after = forward(params, caches, batch, config, on_layer=observe_layer)
        assert after is not None
        over = (-2, -1) if config.linear.kind == "gdn" else -1
        norms = jnp.sqrt(jnp.sum(after.recurrent[SLOT] ** 2, axis=over))
        means = jnp.stack(found)
        return means, norms.reshape(means.shape)

    by_head = PartitionSpec(None, AXIS, None)
    ins = (model_partition(config), cache_partition(config), REPLICATED, REPLICATED)
    return jax.jit(sharded(run, mesh, ins, (by_head, by_head)))


def _one_prefill(prefix: Sequence[int], size: int) -> PrefillBatch:
    """A sequence from zero state, padded to `size` tokens."""
    ids, at = np.zeros(size, np.int32), np.arange(size, dtype=np.int32)
    ids[: len(prefix)] = prefix
    real, cu = at < len(prefix), np.array([0, len(prefix)], np.int32)
    load, store = (np.array([slot], np.int32) for slot in (NO_SLOT, SLOT))
    fields: dict[str, Any] = {
        "token_ids": ids,
        "positions": np.where(real, at, 0),
        "kv_slots": np.where(real, at, -1),
        "cu_seqlens": cu,
        "page_table": np.arange(size // PAGE, dtype=np.int32)[None],
        "segments": Segments(*(jnp.asarray(x) for x in (cu, load, store))),
    }
    return PrefillBatch(**fields)


def _log_decay(
    layer: LayerParams, x: Array, stored: tuple[Array, ...], config: ModelConfig
) -> Array | None:
    """g [T, H, U] of a linear layer whose residual stream is `x`; None for full attention."""
    if not isinstance(layer.mixer, GatedDeltaNetParams | KimiDeltaAttentionParams):
        return None
    if layer.mixer_mix is not None:
        x = mix_residuals(layer.mixer_mix, stored, x, config.norm_eps)
    if layer.norm == "pre":
        x = rms_norm(x, layer.mixer_norm, config.norm_eps)
    work = working_dtype(x)
    match layer.mixer:
        case GatedDeltaNetParams() as mixer:
            z = project(x, mixer.ba[1], dtype=work) + mixer.dt_bias
            z, A_log = z.reshape(len(x), -1, 1), mixer.A_log.reshape(-1, 1)
        case KimiDeltaAttentionParams() as mixer:
            z = project(project(x, mixer.decay_down), mixer.decay_up, dtype=work) + mixer.dt_bias
            A_log = mixer.A_log[:, None]
    return _gate(z, A_log, config.linear)


def _gate(
    z: Float[Array, "T H U"], A_log: Float[Array, "H 1"], config: LinearAttentionConfig
) -> Float[Array, "T H U"]:
    """The gates of `horizon.static_log_decay` on what tokens really put in, bias included."""
    rate = jnp.exp(A_log)
    if config.gate == "safe":
        return config.gate_lower_bound * jax.nn.sigmoid(rate * z)
    return -rate * jax.nn.softplus(z)
