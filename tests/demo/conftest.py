"""A small corpus, and a model of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jhybrid.demo.corpus import Corpus
from jhybrid.demo.model import initial_params
from jhybrid.demo.presets import Preset
from tests.demo.small import small


def book(seed: int) -> str:
    """Running text without digits, so that a number in a row comes from the task."""
    rng = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "rain", "fall", "down", "softly"]
    sentences = [" ".join(rng.choice(words, 8)).capitalize() + "." for _ in range(400)]
    return " ".join(sentences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    for index, name in enumerate(("fiction", "essays", "tinystories")):
        documents = [book(10 * index + i) for i in range(25)]
        (path / f"{name}.txt").write_text("\n<|endoftext|>\n".join(documents))
    return path


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return Corpus.load(folder)


@pytest.fixture(scope="module")
def preset() -> Preset:
    return small("tiny-gdn", value_heads=2)


@pytest.fixture(scope="module")
def params(preset: Preset):
    return initial_params(preset.architecture.model_config(), 0)
