"""Kimi's experts: w1 (gate), w3 (up) and w2 (down) one by one, fused, or one by one in MXFP4."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jhybrid.config import ModelConfig, MoEConfig

from ..mapping import Rule, Source, Transform
from .common import filled, reshaped, single, stacked, unchanged
from .mxfp4 import GROUP, unpack

BYTES = (np.dtype(np.uint8),)


def experts(target: str, source: str, config: ModelConfig, names: Collection[str]) -> list[Rule]:
    """All of a MoE block; `source` ends in `block_sparse_moe.` or `mlp.`."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    gate, shape = source + "gate.", (moe.experts, hidden)
    rules = [
        unchanged(target + "router", gate + "weight", shape),
        unchanged(target + "bias", gate + "e_score_correction_bias", (moe.experts,)),
        *_routed(target, source + "experts.", moe.latent_width or hidden, moe, names),
    ]
    if moe.shared_width:
        up, shared = (moe.shared_width, hidden), source + "shared_experts."
        sources = [shared + "gate_proj.weight", shared + "up_proj.weight"]
        rules += [
            stacked(target + "shared.gate_up", sources, up, up),
            unchanged(target + "shared.down", shared + "down_proj.weight", up[::-1]),
        ]
    if moe.latent_width is not None:
        down, latent = (moe.latent_width, hidden), source + "routed_expert_"
        rules += [
            unchanged(target + "latent.down", latent + "down_proj.weight", down),
            unchanged(target + "latent.up", latent + "up_proj.weight", down[::-1]),
        ]
        if moe.latent_norm:
            rules.append(unchanged(target + "latent.norm", latent + "norm.weight", down[:1]))
    return rules


def _routed(
    target: str, source: str, width: int, moe: MoEConfig, names: Collection[str]
) -> list[Rule]:
    count, inner = moe.experts, moe.expert_width
    if source + "gate_up_proj" in names:
        both = (count, 2 * inner, width)
        return [
            reshaped(target + "gate_up", (count, 2, inner, width), source + "gate_up_proj", both),
            unchanged(target + "down", source + "down_proj", (count, width, inner)),
        ]
    gates = [source + f"{e}.{name}." for e in range(count) for name in ("w1", "w3")]
    downs = [source + f"{e}.w2." for e in range(count)]
    make = packed if gates[0] + "weight_packed" in names else single
    return [
        make(target + "gate_up", gates, (count, 2, inner, width)),
        make(target + "down", downs, (count, width, inner)),
    ]


def packed(target: str, prefixes: Sequence[str], shape: tuple[int, ...]) -> Rule:
    """A tensor of packed values and one of scales for each matrix; only ever read."""
    out, width = shape[-2:]
    if width % GROUP:
        raise ValueError(f"{prefixes[0]}: MXFP4 needs a multiple of {GROUP} inputs, got {width}")

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        raise NotImplementedError("weights are not packed to MXFP4")

    sources = [
        source
        for prefix in prefixes
        for source in (
            Source(prefix + "weight_packed", (out, width // 2), BYTES),
            Source(prefix + "weight_scale", (out, width // GROUP), BYTES),
        )
    ]
    return Rule(target, tuple(sources), Transform(filled(shape, 2, unpack), inverse))
