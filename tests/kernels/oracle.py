"""The ops in float64 numpy, token by token, written from the formulas alone."""

from __future__ import annotations

import numpy as np


def gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q, k [T, Hk, K]; v [T, H, V]; g [T, H] or [T, H, K]; beta [T, H]; state [H, K, V]."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    heads, width = v.shape[1], k.shape[2]
    group = heads // k.shape[1]
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * width**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    s = np.zeros((heads, width, v.shape[2])) if state is None else np.array(state, np.float64)
    o = np.zeros(v.shape)
    for t in range(len(v)):
        for h in range(heads):
            kt, qt = k[t, h // group], q[t, h // group]
            s[h] *= np.exp(g[t, h])[..., None] if g.ndim == 3 else np.exp(g[t, h])
            s[h] += np.outer(kt, beta[t, h] * (v[t, h] - s[h].T @ kt))
            o[t, h] = s[h].T @ qt
    return o, s


def causal_conv1d(
    x: np.ndarray, weight: np.ndarray, window: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """x [T, C]; weight [C, J]; window [J - 1, C]: silu of the convolution, and the new window."""
    padded = np.concatenate([window, x]).astype(np.float64)
    size = weight.shape[1]
    y = np.stack([(padded[t : t + size] * weight.T).sum(0) for t in range(len(x))])
    return y / (1 + np.exp(-y)), padded[len(padded) - size + 1 :]


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, scale: float
) -> np.ndarray:
    """q [T, Hq, D] at `positions` against k, v [S, Hkv, D] at 0..S-1, causal."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for t, position in enumerate(positions):
        for h in range(q.shape[1]):
            scores = k[: position + 1, h // group] @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[: position + 1, h // group]
    return out
