"""Batches made by other processes ahead of time, so that the accelerator never waits for data."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import benchmark, dialogue, tasks
from .corpus import Corpus
from .wording import Rng

TASKS: dict[str, tasks.Task] = {
    "fiction": tasks.fiction,
    "stories": tasks.stories,
    "induction": tasks.induction,
    "registers": tasks.registers,
    "recall": tasks.recall,
    "copying": tasks.copying,
    "needles": benchmark.needles,
    "writes": benchmark.writes,
    "variables": benchmark.variables,
    "common_words": benchmark.common_words,
    "frequent_words": benchmark.frequent_words,
    "dialogue": dialogue.dialogue,
    "chat_recall": dialogue.chat_recall,
}
TASK_NAMES = tuple(TASKS)

# Shares of rows whose questions must be answered without what the recurrent states, or without what
# keys and values hold of the text before them: needles are to be found by attention, and order kept
# in the states, as in large hybrids. Left to itself a small model may do the reverse.
WITHOUT_STATES = {"needles": 0.3, "recall": 0.2}
WITHOUT_KEYS = {"registers": 1.0, "writes": 0.9, "variables": 0.1}


@dataclass(frozen=True)
class Batch:
    """Rows of one length. Position t predicts `ids[:, t + 1]` with weight `weights[:, t]`.

    The cuts are those of a DenseBatch; a row without has T.
    """

    ids: np.ndarray  # uint16 [B, T + 1]
    weights: np.ndarray  # float32 [B, T]
    task: np.ndarray  # int32 [B], index into TASK_NAMES
    state_cut: np.ndarray  # int32 [B]
    key_cut: np.ndarray  # int32 [B]

    @property
    def length(self) -> int:
        return self.weights.shape[1]


@dataclass(frozen=True)
class BatchSpec:
    """What a batch holds; the same spec always gives the same batch."""

    seed: tuple[int, ...]
    length: int
    rows: int
    mix: tuple[tuple[str, float], ...]  # task and its share of the rows


def make_batch(corpus: Corpus, spec: BatchSpec) -> Batch:
    rng = np.random.default_rng(spec.seed)
    chosen = choose(rng, dict(spec.mix), spec.rows)
    rows = [TASKS[name](rng, corpus, spec.length + 1) for name in chosen]

    def cuts(shares: Mapping[str, float]) -> np.ndarray:
        drawn = [rng.random() < shares.get(name, 0) for name in chosen]
        found = [row.boundary if cut else None for row, cut in zip(rows, drawn, strict=True)]
        return np.array([spec.length if at is None else at for at in found], np.int32)

    return Batch(
        ids=np.stack([row.ids for row in rows]),
        weights=np.stack([row.weights[1:] for row in rows]),
        task=np.array([TASK_NAMES.index(name) for name in chosen], np.int32),
        state_cut=cuts(WITHOUT_STATES),
        key_cut=cuts(WITHOUT_KEYS),
    )


def choose(rng: Rng, shares: Mapping[str, float], count: int) -> list[str]:
    """`count` names in proportion to their shares: evenly spaced draws, so that a batch of few
    rows stays as close to the mix as it can."""
    names, weights = list(shares), np.array(list(shares.values()), np.float64)
    edges = np.cumsum(weights / weights.sum())
    points = (np.arange(count) + rng.random()) / count
    return [names[min(int(i), len(names) - 1)] for i in np.searchsorted(edges, points)]


_corpus: Corpus | None = None  # of this worker process


def _start_worker(folder: Path) -> None:
    global _corpus
    _corpus = Corpus.load(folder)


def _make_in_worker(spec: BatchSpec) -> Batch:
    assert _corpus is not None
    return make_batch(_corpus, spec)


def worker_pool(folder: Path, workers: int) -> ProcessPoolExecutor:
    """Processes that hold the corpus."""
    # spawn: a fork of a process that runs JAX may deadlock
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start_worker, (folder,))


class BatchStream:
    """Batches in the order of their specs, `ahead` of them in the making at any time.

    `next_spec` is asked as late as possible, so that it can follow the clock.
    """

    def __init__(
        self, pool: ProcessPoolExecutor, next_spec: Callable[[], BatchSpec], ahead: int
    ) -> None:
        self._pool, self._next_spec = pool, next_spec
        self._pending: deque[Future[Batch]] = deque()
        for _ in range(ahead):
            self._submit()

    def _submit(self) -> None:
        self._pending.append(self._pool.submit(_make_in_worker, self._next_spec()))

    def __next__(self) -> Batch:
        self._submit()
        return self._pending.popleft().result()

    def waiting(self) -> int:
        """How many batches lie ready: 0 means that the workers are the bottleneck."""
        return sum(future.done() for future in self._pending)

    def close(self) -> None:
        for future in self._pending:
            future.cancel()
