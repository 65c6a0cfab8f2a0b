"""Greedy generation checked by one run over the whole sequence."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from jhybrid.config import ModelConfig
from jhybrid.convert.verify import dense_logits
from jhybrid.models.specs import ModelParams


def assert_greedy(
    params: ModelParams, prompt: np.ndarray, expected: np.ndarray, config: ModelConfig, mesh: Mesh
) -> None:
    """The model continues `prompt` with `expected`.

    If every token is the argmax after those before it, then, by induction, generating one token
    at a time gives them all.
    """
    whole = np.concatenate([prompt, expected])[None]
    best = dense_logits(params, whole, config, mesh)[0].argmax(-1)
    np.testing.assert_array_equal(best[len(prompt) - 1 : -1], expected)
