"""Comparing converted weights with transformers, in float32."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jhybrid.batch import DenseBatch
from jhybrid.config import ModelConfig
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.models.hybrid import forward, logits
from jhybrid.models.specs import ModelParams, model_partition
from jhybrid.sharding import REPLICATED, make_mesh, sharded
from jhybrid.weights import load_params, read_manifest

TOLERANCE = 2e-4  # of the largest logit
TOKENS = 80  # past one chunk of the recurrence


def dense_logits(
    params: ModelParams, token_ids: np.ndarray, config: ModelConfig, mesh: Mesh
) -> np.ndarray:
    """Float32 logits [B, T, vocab] of whole sequences from zero state."""
    with jax.default_matmul_precision("highest"):
        out = _compiled(config, mesh)(params, jnp.asarray(token_ids, jnp.int32))
    return np.asarray(out)


@functools.lru_cache(maxsize=16)
def _compiled(config: ModelConfig, mesh: Mesh) -> Any:
    config = config.for_tensor_parallel(mesh.size)

    def run(params: ModelParams, token_ids: jax.Array) -> jax.Array:
        hidden, _ = forward(params, None, DenseBatch(token_ids=token_ids), config)
        return logits(params, hidden, config)

    specs = (model_partition(config), REPLICATED)
    return jax.jit(sharded(run, mesh, specs, REPLICATED))


# of Kimi Delta Attention, whose convolutions stay float32 as its decay does
KEPT = ("self_attn.conv1d.weight", "A_log")


def torch_logits(folder: Path, token_ids: np.ndarray, dtype: Any = jnp.float32) -> np.ndarray:
    """What transformers computes in float32 from weights rounded as the conversion rounds them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        if jnp.dtype(dtype) == jnp.bfloat16:
            for name, weight in model.named_parameters():
                # norms and decay stay float32
                if weight.ndim > 1 and not name.endswith(KEPT):
                    weight.copy_(weight.to(torch.bfloat16).to(torch.float32))
        return model(torch.from_numpy(token_ids.astype(np.int64))).logits.float().numpy()


def verify(src: str | Path, dst: str | Path) -> tuple[float, float]:
    """(max abs difference, largest logit) of `dst` against transformers on `src`.

    Both run in float32 on one device, one after the other. ValueError above the tolerance.
    """
    src, dst = Path(src), Path(dst)
    config = model_config(read_hf_config(dst))
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, config.vocab_size, (1, TOKENS))
    expected = torch_logits(src, token_ids, read_manifest(dst)["dtype"])
    mesh = make_mesh(1)
    params = load_params(dst, config, mesh, jnp.float32)
    found = dense_logits(params, token_ids, config, mesh)
    difference, scale = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    if not difference <= TOLERANCE * scale:  # NaN fails too
        raise ValueError(
            f"{dst}: float32 logits differ from transformers by {difference:.3g} where the largest "
            f"is {scale:.3g}; expected at most {TOLERANCE * scale:.3g}"
        )
    return difference, scale
