"""Transforms and rules that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from jhybrid.config import LinearAttentionConfig

from ..mapping import Rule, Source, Transform

Shape = tuple[int, ...]


def reshaped(target: str, shape: Shape, source: str, source_shape: Shape) -> Rule:
    """The same values in the same order."""
    transform = Transform(lambda x: x.reshape(shape), lambda p: (p.reshape(source_shape),))
    return Rule(target, (Source(source, source_shape),), transform)


def unchanged(target: str, source: str, shape: Shape) -> Rule:
    return reshaped(target, shape, source, shape)


def zero_centred(target: str, source: str, size: int) -> Rule:
    """A norm published as w and applied as 1 + w; stored as the multiplier."""
    one = np.float32(1)
    transform = Transform(
        lambda w: w.astype(np.float32) + one, lambda p: (p.astype(np.float32) - one,)
    )
    return Rule(target, (Source(source, (size,)),), transform)


def stacked(target: str, sources: list[str], shape: Shape, part: Shape) -> Rule:
    """Tensors of one shape along a new first axis, each then viewed as `shape`."""
    transform = Transform(
        lambda *parts: np.stack([x.reshape(shape) for x in parts]),
        lambda p: tuple(x.reshape(part) for x in p),
    )
    return Rule(target, tuple(Source(name, part) for name in sources), transform)


def single(target: str, prefixes: Sequence[str], shape: tuple[int, ...]) -> Rule:
    """One tensor for each matrix of an array of matrices."""
    matrix = shape[-2:]

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(p.reshape(-1, *matrix))

    sources = tuple(Source(prefix + "weight", matrix) for prefix in prefixes)
    return Rule(target, sources, Transform(filled(shape, 1, lambda x: x), inverse))


def filled(
    shape: tuple[int, ...], each: int, matrix: Callable[..., np.ndarray]
) -> Callable[..., np.ndarray]:
    """Fill an array matrix by matrix from `each` tensors: no second copy of all the experts."""

    def forward(*parts: np.ndarray) -> np.ndarray:
        dtype = parts[0].dtype if each == 1 else ml_dtypes.bfloat16
        out = np.empty((len(parts) // each, *shape[-2:]), dtype)
        for i, filled in enumerate(out):
            filled[...] = matrix(*parts[i * each : (i + 1) * each])
        return out.reshape(shape)

    return forward


def dense_mlp(target: str, source: str, hidden: int, width: int) -> list[Rule]:
    shape = (width, hidden)
    sources = [source + "gate_proj.weight", source + "up_proj.weight"]
    return [
        stacked(target + "gate_up", sources, shape, shape),
        unchanged(target + "down", source + "down_proj.weight", (hidden, width)),
    ]


def group_rows(parts: list[np.ndarray], groups: int) -> np.ndarray:
    """[G n_i, ...] each -> [G, sum n_i, ...]: the i-th block of rows of every group together."""
    return np.concatenate([x.reshape(groups, -1, *x.shape[1:]) for x in parts], axis=1)


def ungroup_rows(grouped: np.ndarray, widths: list[int]) -> list[np.ndarray]:
    """The inverse: [G, sum n_i, ...] -> [G n_i, ...] each."""
    parts = np.split(grouped, np.cumsum(widths)[:-1], axis=1)
    return [x.reshape(-1, *x.shape[2:]) for x in parts]


def conv_by_key_head(target: str, source: str, c: LinearAttentionConfig) -> Rule:
    """A depthwise convolution over all q, all k, all v channels -> q | k | v of each key head."""
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    widths = [c.key_dim, c.key_dim, c.group * c.value_dim]
    shape = (2 * keys + values, 1, c.conv_size)

    def forward(x: np.ndarray) -> np.ndarray:
        return group_rows(np.split(x[:, 0], [keys, 2 * keys]), c.key_heads)

    def inverse(p: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.concatenate(ungroup_rows(p, widths))[:, None],)

    return Rule(target, (Source(source, shape),), Transform(forward, inverse))
