"""Every model family behind the engine: packed prompts, caches, reuse, against one dense pass."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jhybrid.convert.verify import dense_logits
from jhybrid.hf_config import model_config, read_hf_config
from jhybrid.weights import load_hf_params
from tests.golden_files import FOLDERS, name_of
from tests.k3_fixtures import make_tensors, write

from .tiny import assert_idle, engine_of, request, run

NAMES = (
    "qwen3_next-next_some_dense",
    "qwen3_5_moe-moe_text",
    "olmo_hybrid-olmo",
    "kimi_linear-query_low_rank",
    "kimi_k3",
)
LENGTHS, NEW, LONGEST = (5, 33, 50, 64), 8, 80


@pytest.fixture(scope="module")
def kimi_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("k3") / "hf", make_tensors())


@pytest.mark.parametrize("name", NAMES)
def test_batches_cold_and_cached_equal_a_dense_pass(name: str, kimi_k3: Path, mesh: Mesh) -> None:
    golden = {name_of(folder): folder for folder in FOLDERS}
    folder = golden.get(name, kimi_k3)
    config = model_config(read_hf_config(folder))
    params = load_hf_params(folder, config, mesh, jnp.float32)
    vocab = min(config.vocab_size, 256)
    engine = engine_of(params, config, pages=80, slots=24, valid_vocab=vocab, max_running=2)
    rng = np.random.default_rng(0)
    prompts = {f"p{n}": rng.integers(0, vocab, n).tolist() for n in LENGTHS}
    for sighting in range(2):
        results = run(engine, [request(n, p, max_tokens=NEW) for n, p in prompts.items()])
        for key, prompt in prompts.items():
            assert results[key].usage.restored_tokens == sighting * (len(prompt) - 1)
            tokens = [*prompt, *results[key].token_ids]
            ids = np.zeros((1, LONGEST), np.int32)
            ids[0, : len(tokens)] = tokens
            logits = dense_logits(params, ids, config, mesh)[0, :, :vocab]
            rows = logits[len(prompt) - 1 : len(tokens) - 1]
            # equal, but where the two best are closer than rounding
            chosen = rows[np.arange(NEW), results[key].token_ids]
            assert (rows.max(axis=1) - chosen < 1e-4).all(), (key, sighting)
    assert_idle(engine)
