"""A prefill cut at every position equals the whole: golden checkpoint, through pages and slots."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.weights import load
from tests.stepping import cached_logits

FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_5" / "text_tied"


def test_prefill_cut_at_every_position(mesh: Mesh) -> None:
    config = model_config(read_hf_config(FOLDER))
    params = load(FOLDER, config, mesh, jnp.float32)
    with np.load(FOLDER / "expected.npz") as expected:
        tokens, logits = expected["token_ids"], expected["logits"]
    assert len(tokens) >= 64
    for cut in range(1, len(tokens)):
        found = cached_logits(params, tokens, config, mesh, (cut, len(tokens) - cut))
        np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5, err_msg=f"cut at {cut}")
