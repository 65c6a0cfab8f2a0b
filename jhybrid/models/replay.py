"""Replay: the linear states of all groups rolled forward over cached group inputs.

Tail-Replay's section 3: every group starts from zero (or from the states of a checkpoint) and runs
its own linear layers over the exact inputs it had when they were first computed; its error, if any,
stays inside the group. Of a group's last layer only the states count, so that its output and
its feed-forward block are left out.

All groups run in one program, layer position by layer position. Each group's products with its own
weights are their own GEMMs; the recurrence, which has no weights and is bound by the length of its
chain, runs once for all groups as more sequences. Stacking the weights would make single GEMMs of
the others, too, and is not worth it: of Qwen3.5-4B a replay uses 2.1 G weights (4.3 GB, 0.9 ms of
an H200's memory), and a copy of them in stacks would have to be read and written for every replay
(1.8 ms) or kept for good, while k tokens cost 4.3 k GFLOP, 2.7 ms at k = 410 (5 % of 8,192) and
10 ms at k = 1,592 (5 % of 31,847) of 650 TFLOP/s: from k = 206 on a GEMM is bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels import Segments, ragged_gated_delta_rule

from ..batch import Caches, ReplayBatch
from ..config import ModelConfig
from ..layers.delta_rule import RuleInputs
from ..layers.gated_delta_net import (
    GatedDeltaNetParams,
    gated_delta_net_inputs,
    gated_delta_net_output,
)
from ..layers.kimi_delta_attention import (
    KimiDeltaAttentionParams,
    kimi_delta_attention_inputs,
    kimi_delta_attention_output,
)
from ..layers.norm import rms_norm
from .group_inputs import read_group_inputs
from .groups import Group
from .hybrid import LayerParams, ModelParams, embed, feed_forward


class _Pending(NamedTuple):
    """A group whose layer waits for the recurrence: stream, output gate (KDA: its input)."""

    group: Group
    x: Float[Array, "T D"]
    gate: Array


def replay(
    params: ModelParams,
    caches: Caches,
    batch: ReplayBatch,
    config: ModelConfig,
    groups: Sequence[Group],
) -> Caches:
    """New caches: the states and windows of `groups` after the batch's tokens, in its slots."""
    streams = [(group, _input(params, caches, batch, group)) for group in groups]
    for position in range(max(len(group.layers) for group in groups)):
        streams = [(group, x) for group, x in streams if position < len(group.layers)]
        waiting: list[_Pending] = []
        inputs: list[RuleInputs] = []
        for group, x in streams:
            layer, index = params.layers[group.layers[position]], group.linear[position]
            found, gate, caches = _rule_inputs(layer, x, caches, index, batch, config)
            waiting.append(_Pending(group, x, gate))
            inputs.append(found)
        layers = [group.linear[position] for group, _ in streams]
        outputs, caches = _delta_rules(inputs, caches, layers, batch.segments)
        streams = []
        for (group, x, gate), o in zip(waiting, outputs, strict=True):
            if position + 1 < len(group.layers):
                layer = params.layers[group.layers[position]]
                x = x + _mixer_output(layer, o, gate, config)
                x = x + feed_forward(layer, x, config)
            streams.append((group, x))
    return caches


def _input(
    params: ModelParams, caches: Caches, batch: ReplayBatch, group: Group
) -> Float[Array, "T D"]:
    if group.stored is None:
        return embed(params, batch.token_ids)
    assert caches.group_inputs is not None
    dtype = params.embedding.dtype
    return read_group_inputs(caches.group_inputs, group.stored, batch.input_slots, dtype)


def _rule_inputs(
    layer: LayerParams,
    x: Float[Array, "T D"],
    caches: Caches,
    index: int,
    batch: ReplayBatch,
    config: ModelConfig,
) -> tuple[RuleInputs, Array, Caches]:
    """What the layer's recurrence reads; its conv windows are written already."""
    h = x if layer.norm == "post" else rms_norm(x, layer.mixer_norm, config.norm_eps)
    match layer.mixer:
        case GatedDeltaNetParams() as mixer:
            found, gate, new = gated_delta_net_inputs(mixer, h, caches, index, batch, config.linear)
        case KimiDeltaAttentionParams() as mixer:
            found, new = kimi_delta_attention_inputs(mixer, h, caches, index, batch, config.linear)
            gate = h
        case _:
            raise TypeError(f"a group holds linear layers only, got {type(layer.mixer).__name__}")
    assert new is not None
    return found, gate, new


def _mixer_output(
    layer: LayerParams, o: Float[Array, "T H V"], gate: Array, config: ModelConfig
) -> Float[Array, "T D"]:
    """What the layer's mixer adds to the residual stream."""
    if isinstance(layer.mixer, GatedDeltaNetParams):
        h = gated_delta_net_output(layer.mixer, o, gate, config.linear)
    else:
        assert isinstance(layer.mixer, KimiDeltaAttentionParams)
        h = kimi_delta_attention_output(layer.mixer, o, gate, config.linear)
    return rms_norm(h, layer.mixer_norm, config.norm_eps) if layer.norm == "post" else h


def _delta_rules(
    inputs: list[RuleInputs], caches: Caches, layers: list[int], segments: Segments
) -> tuple[list[Float[Array, "T H V"]], Caches]:
    """The recurrences of several layers over the same tokens, as one ragged batch.

    A slot of a layer is a slot of its own in the pool seen as [S * L, 1, ...].
    """
    length = inputs[0].v.shape[0]
    packed = RuleInputs(*(jnp.concatenate(parts) for parts in zip(*inputs, strict=True)))
    pool = caches.recurrent
    slots, count = pool.shape[:2]
    flat = pool.reshape(slots * count, 1, *pool.shape[2:])
    o, flat = ragged_gated_delta_rule(*packed, flat, 0, _tile(segments, layers, length, count))
    outputs = [o[i * length : (i + 1) * length] for i in range(len(layers))]
    return outputs, replace(caches, recurrent=flat.reshape(pool.shape))


def _tile(segments: Segments, layers: list[int], length: int, count: int) -> Segments:
    """The segments once for every layer, each time over the next `length` tokens; what the
    batch leaves unused at its end is one more segment, from and to no slot."""
    copies = jnp.arange(len(layers), dtype=jnp.int32)[:, None] * length
    starts = (copies + segments.cu).reshape(-1)
    cu = jnp.append(starts, jnp.int32(len(layers) * length))
    each = jnp.array(layers, jnp.int32)[:, None]

    def place(slot: Array) -> Array:
        slot = jnp.append(slot, jnp.int32(-1))  # NO_SLOT, for load and store alike
        return jnp.where(slot >= 0, slot * count + each, slot).reshape(-1)

    return Segments(cu, place(segments.load), place(segments.store))
