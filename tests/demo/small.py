"""Presets of two layers, text of generated rows, and runs of a model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.batch import DenseBatch
from jhybrid.demo.batches import TASKS
from jhybrid.demo.corpus import Corpus
from jhybrid.demo.model import logits_fn
from jhybrid.demo.presets import PRESETS, Preset
from jhybrid.demo.rows import Row
from jhybrid.demo.tokenizer import build_tokenizer
from jhybrid.sharding import make_mesh

SEEDS = range(8)
TOKENIZER = build_tokenizer()


def rows(corpus: Corpus, task: str, size: int) -> list[Row]:
    return [TASKS[task](np.random.default_rng((seed, size)), corpus, size) for seed in SEEDS]


def text(ids: np.ndarray) -> str:
    return TOKENIZER.decode(ids.tolist(), skip_special_tokens=False)


def dense_run(config):
    run = logits_fn(config, make_mesh(1), jnp.float32)
    return jax.jit(lambda params, ids: run(params, DenseBatch(ids)))


def small(name: str, **more: int) -> Preset:
    """A preset of two layers."""
    sizes = {"pattern": "LF", "hidden": 32, "mlp": 32, "linear_heads": 1} | more
    preset = PRESETS[name]
    return dataclasses.replace(
        preset, architecture=dataclasses.replace(preset.architecture, **sizes)
    )
