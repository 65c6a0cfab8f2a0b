"""Replay: the linear states of all groups rolled forward over cached group inputs.

Tail-Replay's section 3: every group starts from zero (or from the states of a checkpoint) and runs
its own linear layers over the exact inputs it had when they were first computed; its error, if any,
stays inside the group. Of a group's last layer only the states count, so that its output and
its feed-forward block are left out.

All groups run in one program, layer position by layer position. Each group's products with its own
weights are their own GEMMs; the recurrence, which has no matrices and is bound by the length of its
chain, runs once for all groups as more sequences. Stacking the weights would make single GEMMs of
the others, too, and is not worth it: of Qwen3.5-4B a replay uses 2.1 G weights (4.3 GB, 0.9 ms of
an H200's memory), and a copy of them in stacks would have to be read and written for every replay
(1.8 ms) or kept for good, while k tokens cost 4.3 k GFLOP, 2.7 ms at k = 410 (5 % of 8,192) and
10 ms at k = 1,592 (5 % of 31,847) of 650 TFLOP/s: from k = 206 on a GEMM is bound by arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import (
    NO_SLOT,
    Activation,
    Gates,
    Part,
    Segments,
    ragged_gated_delta_rule,
    suffix_replay,
)

from ..batch import Caches, ReplayBatch
from ..config import ModelConfig
from ..layers.delta_rule import RuleInputs, gate_activation
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
from ..layers.norm import Normed, rms_norm
from .group_inputs import read_group_inputs
from .groups import Group
from .hybrid import block_input, embed, feed_forward
from .specs import LayerParams, LinearMixer, ModelParams

Stream = tuple[Group, Float[Array, "T D"]]


class _Waiting(NamedTuple):
    """Layers that wait for the recurrence.

    Their convolutions have written one array: the recurrence takes them as one batch, and to put
    them together afterwards would move 2 GB for 1,024 tokens of Qwen3.6-27B.
    """

    layers: list[int]  # by their numbers among the linear layers
    qkv: Float[Array, "G*T Hk W"]
    gates: list[Gates]
    output_gates: list[Array | Normed]  # KDA: the inputs of the mixers


def replay(
    params: ModelParams,
    caches: Caches,
    batch: ReplayBatch,
    config: ModelConfig,
    groups: Sequence[Group],
) -> Caches:
    """New caches: the states and windows of `groups` after the batch's tokens, in its slots."""
    rule = _Rule(batch.segments, _gate_constants(params), gate_activation(config.linear))
    streams = [(group, _input(params, caches, batch, group)) for group in groups]
    for position in range(max(len(group.layers) for group in groups)):
        ending = [stream for stream in streams if position + 1 == len(stream[0].layers)]
        streams = [stream for stream in streams if position + 1 < len(stream[0].layers)]
        if ending:
            waiting, caches = _inputs_of_layers(params, caches, batch, config, ending, position)
            caches = rule.states(waiting, caches)
        if streams:
            waiting, caches = _inputs_of_layers(params, caches, batch, config, streams, position)
            o, caches = rule.outputs(waiting, caches)
            gates, going, streams = waiting.output_gates, streams, []
            for n, ((group, x), gate) in enumerate(zip(going, gates, strict=True)):
                layer, start = params.layers[group.layers[position]], np.int32(n * len(x))
                streams.append((group, _rest_of_layer(layer, x, o, start, gate, config)))
    return caches


def _inputs_of_layers(
    params: ModelParams,
    caches: Caches,
    batch: ReplayBatch,
    config: ModelConfig,
    streams: Sequence[Stream],
    position: int,
) -> tuple[_Waiting, Caches]:
    """What the recurrences of the layers at a position of their groups read."""
    layers = [group.linear[position] for group, _ in streams]
    tokens, qkv = batch.token_ids.shape[0], None
    gates, output_gates = list[Gates](), list[Array | Normed]()
    for n, (group, x) in enumerate(streams):
        layer = params.layers[group.layers[position]]
        numbers = np.int32(layers[n]), np.int32(n * tokens)
        rows = len(streams) * tokens
        found, gate, caches = _rule_inputs(layer, x, caches, numbers, qkv, batch, config, rows)
        qkv = found.qkv
        gates.append(found.gates)
        output_gates.append(gate)
    assert qkv is not None
    return _Waiting(layers, qkv, gates, output_gates), caches


def _input(
    params: ModelParams, caches: Caches, batch: ReplayBatch, group: Group
) -> Float[Array, "T D"]:
    if group.stored is None:
        return embed(params, batch.token_ids)
    assert caches.group_inputs is not None
    dtype = params.embedding.dtype
    return read_group_inputs(caches.group_inputs, group.stored, batch.input_slots, dtype)


@functools.partial(jax.jit, static_argnames=("config", "rows"))
def _rule_inputs(
    layer: LayerParams,
    x: Float[Array, "T D"],
    caches: Caches,
    numbers: tuple[int | Array, int | Array],
    before: Float[Array, "rows Hk W"] | None,
    batch: ReplayBatch,
    config: ModelConfig,
    rows: int,
) -> tuple[RuleInputs, Array | Normed, Caches]:
    """What the layer's recurrence reads; its conv windows are written already.

    `numbers` are the layer's among the linear layers, and of the first row that is its own in an
    array of `rows`, where `before` are those of the layers before it.
    """
    index, into = numbers[0], Part(rows, numbers[1], before)
    h = block_input(layer, x, layer.mixer_norm, config)
    at = (caches, index, batch, config.linear, into)
    match layer.mixer:
        case GatedDeltaNetParams() as mixer:
            found, gate, new = gated_delta_net_inputs(mixer, h, *at)
        case KimiDeltaAttentionParams() as mixer:
            found, new = kimi_delta_attention_inputs(mixer, h, *at)
            gate = h
        case _:
            raise TypeError(f"a group holds linear layers only, got {type(layer.mixer).__name__}")
    assert new is not None
    return found, gate, new


@functools.partial(jax.jit, static_argnames="config")
def _rest_of_layer(
    layer: LayerParams,
    x: Float[Array, "T D"],
    o: Float[Array, "rows H V"],
    start: int | Array,
    gate: Array | Normed,
    config: ModelConfig,
) -> Float[Array, "T D"]:
    """The residual stream plus what the layer adds to it, its recurrence having run; its results
    are the rows from `start` on."""
    residual = None if layer.norm == "post" else x
    if isinstance(layer.mixer, GatedDeltaNetParams):
        assert not isinstance(gate, Normed)
        h = gated_delta_net_output(layer.mixer, o, gate, config.linear, residual, start)
    else:
        assert isinstance(layer.mixer, KimiDeltaAttentionParams)
        mixed = (layer.mixer, o, gate, config.linear, residual, start)
        h = kimi_delta_attention_output(*mixed)
    x = h if residual is not None else x + rms_norm(h, layer.mixer_norm, config.norm_eps)
    return feed_forward(layer, x, x, config)


def _gate_constants(params: ModelParams) -> tuple[Array, Array]:
    """`A_log` and `dt_bias` of all linear layers, [Ll, H] and [Ll, H, *K]."""
    mixers = [layer.mixer for layer in params.layers if isinstance(layer.mixer, LinearMixer)]
    gdn = [m for m in mixers if isinstance(m, GatedDeltaNetParams)]
    A_log = jnp.stack([m.A_log.reshape(-1) for m in mixers])
    dt_bias = [m.dt_bias.reshape(-1) if gdn else m.dt_bias for m in mixers]
    return A_log, jnp.stack(dt_bias)


class _Rule(NamedTuple):
    """The recurrences of several layers over the same tokens, as one ragged batch."""

    segments: Segments
    constants: tuple[Array, Array]
    activation: Activation

    def states(self, waiting: _Waiting, caches: Caches) -> Caches:
        """The caches with the layers' states after the tokens."""
        args, activation = self._arguments(waiting, caches)
        return replace(caches, recurrent=suffix_replay(*args, activation=activation))

    def outputs(self, waiting: _Waiting, caches: Caches) -> tuple[Float[Array, "rows H V"], Caches]:
        """Those, and the results, layer behind layer."""
        args, activation = self._arguments(waiting, caches)
        o, pool = ragged_gated_delta_rule(*args, activation=activation)
        return o, replace(caches, recurrent=pool)

    def _arguments(self, waiting: _Waiting, caches: Caches) -> tuple[Any, Activation]:
        length = waiting.qkv.shape[0] // len(waiting.layers)
        decay = jnp.concatenate([gates.decay for gates in waiting.gates])
        beta = jnp.concatenate([gates.beta for gates in waiting.gates])
        gates = Gates(decay, beta, *self.constants)
        segments, of_segment = _tile(self.segments, waiting.layers, length)
        return (waiting.qkv, gates, caches.recurrent, of_segment, segments), self.activation


def _tile(
    segments: Segments, layers: list[int], length: int
) -> tuple[Segments, Int32[Array, " G"]]:
    """The segments once for every layer, each time over the next `length` tokens, and the layer of
    each; what the batch leaves unused at its end is one more segment, from and to no slot."""
    count = len(layers)
    copies = jnp.arange(count, dtype=jnp.int32)[:, None] * length
    cu = jnp.append((copies + segments.cu).reshape(-1), jnp.int32(count * length))
    load, store = (
        jnp.tile(jnp.append(slots, jnp.int32(NO_SLOT)), count)
        for slots in (segments.load, segments.store)
    )
    of_segment = jnp.repeat(jnp.array(layers, jnp.int32), segments.load.shape[0] + 1)
    return Segments(cu, load, store), of_segment
