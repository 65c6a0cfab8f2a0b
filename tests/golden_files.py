"""Golden checkpoints: Hugging Face folders that hold what transformers computes from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDERS = sorted(path for path in (Path(__file__).parent / "golden").glob("*/*") if path.is_dir())
PROMPT, NEW = 15, 64


def name_of(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def write_expected(folder: Path, vocab: int, seed: int) -> np.ndarray:
    """`expected.npz`: token_ids [T], float32 logits [T, vocab], a prompt and its greedy
    continuation. Needs torch. Returns the prompt followed by its continuation."""
    from jhybrid.convert.verify import torch_logits
    from tests.hf_fixtures import greedy

    token_ids = np.random.default_rng(seed).integers(0, vocab, PROMPT + NEW).astype(np.int32)
    prompt = token_ids[:PROMPT]
    continuation = np.array(greedy(folder, prompt, NEW), np.int32)
    np.savez_compressed(
        folder / "expected.npz",
        token_ids=token_ids,
        logits=torch_logits(folder, token_ids[None])[0],
        prompt=prompt,
        continuation=continuation,
    )
    return np.concatenate([prompt, continuation])
