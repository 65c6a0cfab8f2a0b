"""Measures the trained model: recall trials, skills, held-out text, samples, learned horizons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..batch import DenseBatch
from ..config import ModelConfig, require
from ..models.specs import ModelParams
from ..sharding import make_mesh
from .batches import TASKS
from .clock import Clock
from .corpus import Corpus, Text
from .export import rounded
from .model import gates_fn, logits_fn, static_horizons, text_horizons
from .presets import Preset
from .score import Sheet, failures, score
from .tokenizer import END_OF_TEXT, IM_END, TOKENS_USED, build_tokenizer
from .trials import MISSING, PROMPTS, SKILLS, TEMPERATURE, TRIALS, sample_prompt

Run = Callable[[ModelParams, Array], Array]
ROWS = 25  # rows of one forward pass


class Writer:
    """Continues prompts. Each step runs whole rows again: without caches that is slow for one
    prompt, and simple and fast enough for many. What stands right of a position cannot change it,
    so rows are just padded."""

    def __init__(self, run: Run, params: ModelParams) -> None:
        self._params = params
        self._loop = jax.jit(partial(_write, run))
        self._tokenizer = build_tokenizer()

    def write(
        self, prompts: list[np.ndarray], steps: int, width: int, temperature: float = 0.0
    ) -> list[str]:
        """Up to `steps` bytes after each prompt, up to an end marker, as text."""
        ids = np.full((len(prompts), width), END_OF_TEXT, np.int32)
        lengths = np.array([min(len(p), width - steps) for p in prompts], np.int32)
        for row, prompt, length in zip(ids, prompts, lengths, strict=True):
            row[:length] = prompt[-length:]
        out = np.asarray(self._loop(self._params, ids, lengths, steps, temperature))
        replies = []
        for row, length in zip(out, lengths, strict=True):
            reply = row[length : length + steps]
            ends = np.flatnonzero(np.isin(reply, (END_OF_TEXT, IM_END)))
            text = reply[: ends[0] if len(ends) else None].tolist()
            replies.append(self._tokenizer.decode(text, skip_special_tokens=False))
        return replies


def _write(
    run: Run, params: ModelParams, ids: Array, lengths: Array, steps: Array, temperature: Array
) -> Array:
    """`steps` and `temperature` are traced: one program for each shape of `ids`."""
    rows = jnp.arange(ids.shape[0])

    def body(step: Array, ids: Array) -> Array:
        scores = run(params, ids)[rows, lengths + step - 1, :TOKENS_USED]
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(0), step), scores.shape)
        token = jnp.argmax(scores + temperature * noise, axis=-1)
        return ids.at[rows, lengths + step].set(token.astype(ids.dtype))

    return lax.fori_loop(0, steps, body, ids)


def evaluate(
    params: ModelParams,
    config: ModelConfig,
    preset: Preset,
    corpus: Corpus,
    sheets: dict[tuple[str, int], Sheet],
    clock: Clock,
    seed: int,
    done: Collection[str] = (),
) -> Iterator[tuple[str, Any]]:
    """Names and results, one measurement after the other, of the weights as they are published.

    In bfloat16 where that is fast. What there is no time for comes out as a remark; what is `done`
    is passed over.
    """
    mesh = make_mesh(1)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    whole = logits_fn(config, mesh, dtype)
    run = jax.jit(lambda params, ids: whole(params, DenseBatch(ids)))
    params = rounded(params, config)
    writer = Writer(run, params)
    count, bounds = preset.trials, preset.trial_bytes
    # not the seeds of training
    rngs = iter(np.random.default_rng((seed, 1 << 40)).spawn(100))
    parts: dict[str, Callable[[], Any]] = {"benchmark": lambda: benchmark(whole, params, sheets)}
    parts |= {
        f"recall_{name}": partial(recall, writer, corpus, name, count, bounds, next(rngs))
        for name in TRIALS
    }
    parts["held_out_nats_per_byte"] = lambda: held_out(run, params, preset, corpus, next(rngs))
    parts["horizons"] = lambda: {
        "static": static_horizons(params),
        "on_text": text_horizons(gates_fn(config, mesh, dtype)(params, _rows(corpus, bounds[1]))),
    }
    parts["samples"] = lambda: samples(writer, preset, corpus)
    parts["skills"] = lambda: skills(run, params, preset, corpus, next(rngs))
    for name, part in parts.items():
        if name not in done:
            yield name, _attempt(part) if clock.left > 0 else MISSING


def _attempt(part: Callable[[], Any]) -> Any:
    """The part's result; a fault in one measurement must not cost an unattended run the others."""
    try:
        return part()
    except Exception as error:
        return f"failed: {error!r}"


def benchmark(
    run: Callable[[ModelParams, DenseBatch], Array],
    params: ModelParams,
    sheets: dict[tuple[str, int], Sheet],
) -> dict[str, Any]:
    """Scores by task and length, and which thresholds they miss. Without problems there is nothing
    to miss, and nothing to say: ValueError."""
    require(len(sheets) > 0, "sheets", 0, "the problems of one task at least")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task, length, arms in score(run, params, sheets):
        found.setdefault(task, {})[str(length)] = arms
    return {"scores": found, "failures": failures(found)}


def recall(
    writer: Writer,
    corpus: Corpus,
    name: str,
    count: int,
    bounds: tuple[int, int],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """In how many of `count` fresh trials greedy decoding gives the number."""
    # what hides the number has `bounds` bytes; the number's sentence and the question come on top
    sizes = rng.integers(bounds[0], bounds[1], count, endpoint=True) + 100
    trials = [TRIALS[name](rng, corpus, int(size)) for size in sizes]
    width = _whole_chunks(bounds[1] + 256)
    steps = 64 if any(trial.anywhere for trial in trials) else 8
    passed, failures = 0, []
    for at in range(0, count, ROWS):
        group = trials[at : at + ROWS]
        replies = writer.write([trial.prompt for trial in group], steps, width)
        for trial, reply in zip(group, replies, strict=True):
            passed += trial.passed(reply)
            if not trial.passed(reply):
                failures.append([trial.expected, reply])
    return {"trials": count, "passed": passed, "failures": failures[:5]}


def held_out(
    run: Run, params: ModelParams, preset: Preset, corpus: Corpus, rng: np.random.Generator
) -> dict[str, float]:
    """Mean cross entropy of text the model never saw, and of what it did see beside it."""
    length = _whole_chunks(preset.trial_bytes[0])
    count = ROWS if preset.trials < 50 else 2 * ROWS
    texts: dict[str, Text] = {
        "fiction": corpus.held_out_fiction,
        "stories": corpus.held_out_stories,
        "essays": corpus.essays,
        "fiction_seen": corpus.fiction,
        "stories_seen": corpus.stories,
    }
    return {
        name: _cross_entropy(
            run, params, np.stack([t.window(rng, length + 1) for _ in range(count)])
        )
        for name, t in texts.items()
    }


def _rows(corpus: Corpus, length: int) -> Array:
    """Some held-out text in rows."""
    starts = range(0, 8 * length, length)
    rows = [corpus.held_out_fiction.slice(start, length) for start in starts]
    return jnp.asarray(np.stack(rows), jnp.int32)


def _cross_entropy(run: Run, params: ModelParams, rows: np.ndarray) -> float:
    total = 0.0
    for at in range(0, len(rows), ROWS):
        ids = jnp.asarray(rows[at : at + ROWS], jnp.int32)
        scores = jax.nn.log_softmax(run(params, ids[:, :-1]))
        total -= float(jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1).sum())
    return round(total / rows[:, 1:].size, 4)


def skills(
    run: Run, params: ModelParams, preset: Preset, corpus: Corpus, rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Per task: share of answers of which every token is the model's first guess."""
    length = _whole_chunks(preset.trial_bytes[0])
    found = {}
    for name in SKILLS:
        rows = [TASKS[name](rng, corpus, length + 1) for _ in range(ROWS)]
        ids = np.stack([row.ids for row in rows]).astype(np.int32)
        guesses = np.asarray(jnp.argmax(run(params, jnp.asarray(ids[:, :-1])), axis=-1))
        right = np.concatenate([np.ones((ROWS, 1), bool), guesses == ids[:, 1:]], axis=1)
        exact = [right[i, a:b].all() for i, row in enumerate(rows) for a, b in row.answers]
        found[name] = {"answers": len(exact), "exact": round(float(np.mean(exact)), 3)}
    return found


def samples(writer: Writer, preset: Preset, corpus: Corpus) -> list[dict[str, Any]]:
    """Texts at a moderate temperature, and how much of each is copied from the training text."""
    prompts = [sample_prompt(user, start) for user, start in PROMPTS]
    width = _whole_chunks(preset.sample_bytes + 128)
    replies = writer.write(prompts, preset.sample_bytes, width, TEMPERATURE)
    seen = [text.tokens.astype(np.uint8).tobytes() for text in (corpus.stories, corpus.fiction)]
    return [
        {"user": user, "start": start, "reply": reply, "copied": _copied(start + reply, seen)}
        for (user, start), reply in zip(PROMPTS, replies, strict=True)
    ]


def _copied(text: str, seen: list[bytes], width: int = 50) -> float | None:
    """Share of stretches of 50 bytes that stand word for word in the training text."""
    data = text.encode()
    pieces = [data[i : i + width] for i in range(0, len(data) - width + 1, 10)]
    if not pieces:
        return None
    return round(sum(any(p in s for s in seen) for p in pieces) / len(pieces), 3)


def _whole_chunks(size: int) -> int:
    return -(-size // 64) * 64
