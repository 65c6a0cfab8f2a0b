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
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import (
    NO_SLOT,
    Activation,
    Gates,
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
from .hybrid import embed, feed_forward
from .specs import LayerParams, LinearMixer, ModelParams

T = TypeVar("T")


class _Pending(NamedTuple):
    """A group whose layer waits for the recurrence: stream, output gate (KDA: its input)."""

    group: Group
    x: Float[Array, "T D"]
    gate: Array | Normed


def replay(
    params: ModelParams,
    caches: Caches,
    batch: ReplayBatch,
    config: ModelConfig,
    groups: Sequence[Group],
) -> Caches:
    """New caches: the states and windows of `groups` after the batch's tokens, in its slots."""
    constants = _gate_constants(params)
    streams = [(group, _input(params, caches, batch, group)) for group in groups]
    for position in range(max(len(group.layers) for group in groups)):
        waiting: list[_Pending] = []
        inputs: list[RuleInputs] = []
        for group, x in streams:
            layer, index = params.layers[group.layers[position]], np.int32(group.linear[position])
            found, gate, caches = _rule_inputs(layer, x, caches, index, batch, config)
            waiting.append(_Pending(group, x, gate))
            inputs.append(found)
        ending = [position + 1 == len(group.layers) for group, _ in streams]
        layers = [group.linear[position] for group, _ in streams]
        rule = _Rule(batch.segments, constants, gate_activation(config.linear))
        _, caches = rule(_only(ending, inputs), caches, _only(ending, layers), outputs=False)
        going = [not ends for ends in ending]
        outputs, caches = rule(_only(going, inputs), caches, _only(going, layers), outputs=True)
        streams = []
        for (group, x, gate), o in zip(_only(going, waiting), outputs, strict=True):
            layer = params.layers[group.layers[position]]
            streams.append((group, _rest_of_layer(layer, x, o, gate, config)))
    return caches


def _only(chosen: list[bool], items: list[T]) -> list[T]:
    return [item for item, keep in zip(items, chosen, strict=True) if keep]


def _input(
    params: ModelParams, caches: Caches, batch: ReplayBatch, group: Group
) -> Float[Array, "T D"]:
    if group.stored is None:
        return embed(params, batch.token_ids)
    assert caches.group_inputs is not None
    dtype = params.embedding.dtype
    return read_group_inputs(caches.group_inputs, group.stored, batch.input_slots, dtype)


@functools.partial(jax.jit, static_argnames="config")
def _rule_inputs(
    layer: LayerParams,
    x: Float[Array, "T D"],
    caches: Caches,
    index: int | Array,
    batch: ReplayBatch,
    config: ModelConfig,
) -> tuple[RuleInputs, Array | Normed, Caches]:
    """What the layer's recurrence reads; its conv windows are written already."""
    h = x if layer.norm == "post" else Normed(x, layer.mixer_norm, config.norm_eps)
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


@functools.partial(jax.jit, static_argnames="config")
def _rest_of_layer(
    layer: LayerParams,
    x: Float[Array, "T D"],
    o: Float[Array, "T H V"],
    gate: Array | Normed,
    config: ModelConfig,
) -> Float[Array, "T D"]:
    """The residual stream plus what the layer adds to it, its recurrence having run."""
    residual = None if layer.norm == "post" else x
    if isinstance(layer.mixer, GatedDeltaNetParams):
        assert not isinstance(gate, Normed)
        h = gated_delta_net_output(layer.mixer, o, gate, config.linear, residual)
    else:
        assert isinstance(layer.mixer, KimiDeltaAttentionParams)
        h = kimi_delta_attention_output(layer.mixer, o, gate, config.linear, residual)
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

    def __call__(
        self, inputs: list[RuleInputs], caches: Caches, layers: list[int], *, outputs: bool
    ) -> tuple[list[Float[Array, "T H V"]], Caches]:
        """Outputs of each layer (none, unless asked for), and the caches with its states."""
        if not layers:
            return [], caches
        length = inputs[0].qkv.shape[0]
        qkv = jnp.concatenate([x.qkv for x in inputs])
        gates = Gates(
            jnp.concatenate([x.gates.decay for x in inputs]),
            jnp.concatenate([x.gates.beta for x in inputs]),
            *self.constants,
        )
        segments, of_segment = _tile(self.segments, layers, length)
        if not outputs:
            pool = suffix_replay(
                qkv, gates, caches.recurrent, of_segment, segments, activation=self.activation
            )
            return [], replace(caches, recurrent=pool)
        o, pool = ragged_gated_delta_rule(
            qkv, gates, caches.recurrent, of_segment, segments, activation=self.activation
        )
        each = [o[i * length : (i + 1) * length] for i in range(len(layers))]
        return each, replace(caches, recurrent=pool)


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
