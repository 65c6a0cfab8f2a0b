"""Arms over problems, block by block: what was done already is read from cells.jsonl."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Bool
from tqdm import tqdm

from jhybrid.config import require
from jhybrid.engine.build import LoadedModel
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.stop import StopMatcher
from jhybrid.retention.horizon import static_horizons
from pallas_kernels import NO_SLOT

from ..arms import Arm
from ..outcome import KL_POSITIONS, Outcome
from ..scoring import score
from ..store import Record, Store, digest
from ..tasks.problem import Encoder, Problem
from ..weights import moments
from .device import Device
from .layout import Block, Layout, Span
from .recipe import Recipe, recipe


def run_controlled(
    model: LoadedModel,
    engine: EngineConfig,
    encoder: Encoder,
    arms: Sequence[Arm],
    problems: Sequence[Problem],
    out: Path,
) -> dict[str, dict[str, Outcome]]:
    """Outcomes by arm and problem. The first arm is the one that the others are compared with.

    `engine` says how many problems are in a block (max_running), how many tokens in a call
    (max_prefill_tokens; at least the longest problem's), and the page size.
    """
    layout = layout_for(problems, engine)
    ends = ending_tokens(model)
    horizons = static_horizons(model.params, model.config, gate_input=engine.a_s)
    recipes = {arm.name: recipe(arm, horizons) for arm in arms}
    store = Store(out, "cells")
    settings = {"model": model.name, "weights": moments(model.params), "a_s": engine.a_s}
    tag = digest({**settings, "dtype": model.dtype.name, "horizons": horizons.digest})
    blocks = list(cut(problems, layout))
    device: Device | None = None
    with tqdm(total=len(blocks) * len(arms), desc="controlled", unit="cell") as bar:
        for block in blocks:
            keys = {arm.name: f"{tag}/{arm.name}/{_digest(block)}" for arm in arms}
            missing = [arm for arm in arms if keys[arm.name] not in store]
            bar.update(len(arms) - len(missing))
            if not missing:
                continue
            device = device or Device(model, layout, ends)
            run = BlockRun(device, block, encoder)
            run.fill()
            reference = run.hidden(recipes[arms[0].name])
            # what changes the prefix's keys and values for good comes last
            for arm in sorted(missing, key=lambda arm: recipes[arm.name].kv == "zeros"):
                bar.set_postfix_str(arm.name)
                store.append(keys[arm.name], run.measure(recipes[arm.name], reference))
                bar.update()
    return {arm.name: _outcomes(arm, recipes[arm.name], blocks, store, tag) for arm in arms}


def layout_for(problems: Sequence[Problem], engine: EngineConfig) -> Layout:
    """The least that serves all problems, each of which has a prefix."""
    for p in problems:
        require(p.boundary > 0, f"{p.case}/{p.id}: prefix", p.boundary, "at least one token")
    after = [max(len(p.answer_ids), p.max_tokens) for p in problems]
    pairs = list(zip(problems, after, strict=True))
    longest = max(len(p.prompt) + n for p, n in pairs)
    tokens = engine.max_prefill_tokens
    require(tokens >= longest, "max_prefill_tokens", tokens, f"at least the longest, {longest}")
    return Layout(
        rows=max(2, min(engine.max_running, len(problems))),
        length=longest,
        tail=max(len(p.prompt) - p.boundary + n for p, n in pairs),
        tokens=tokens,
        page_size=engine.page_size,
    )


def ending_tokens(model: LoadedModel) -> Bool[np.ndarray, " V"]:
    """Which tokens end a text."""
    ends = np.zeros(model.valid_vocab, np.bool_)
    ends[sorted(model.eos)] = True
    return ends


def cut(problems: Sequence[Problem], layout: Layout) -> list[Block]:
    """Blocks of problems of about one length and, within it, of about as long answers."""

    def order(p: Problem) -> Any:
        return -(len(p.prompt) // 512), p.max_tokens, p.case, p.id

    ordered = sorted(problems, key=order)
    starts = range(0, len(ordered), layout.rows)
    return [Block(ordered[i : i + layout.rows], layout) for i in starts]


def _digest(block: Block) -> str:
    names = "".join(f"{p.case}/{p.id}/{p.digest}/{p.max_tokens}\n" for p in block.problems)
    return hashlib.sha256(names.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class BlockRun:
    """A block on the device. `fill` first; then arms in any order, but for those that zero KV."""

    device: Device
    block: Block
    encoder: Encoder

    def fill(self) -> None:
        """Prefill every prefix: KV, group inputs, and the state at its end."""
        spans = [
            Span(row, 0, p.boundary, NO_SLOT, row, p.boundary)
            for row, p in enumerate(self.block.problems)
            if p.boundary
        ]
        for call in self.block.calls(spans):
            self.device.prefill(self.block.prefill(call, write=True))

    def measure(self, made: Recipe, reference: list[Array]) -> Record:
        """One line: of each problem of the block its answer, score, NLL and KL to the reference."""
        hidden = self.hidden(made)
        block, problems = self.block, self.block.problems
        first = np.zeros(block.layout.rows, np.int32)
        nll: list[float | None] = []
        kl: list[list[float]] = []
        for call, own, other in zip(self._suffixes(), hidden, reference, strict=True):
            at, gap, best = self.device.compare(own, other, block.targets(call))
            begin = 0
            for row, start, end, *_ in call:
                prompt = len(problems[row].prompt)
                last = begin + prompt - start - 1  # its target is the answer's first token
                first[row] = best[last]
                likelihood = at[last : begin + end - start - 1]
                nll.append(-float(likelihood.mean()) if likelihood.size else None)
                kl.append(_kl(np.maximum(gap[begin : last + 1], 0)))
                begin += end - start
        texts = self._generate(made, first)
        pairs = zip(problems, texts, strict=True)
        return {
            "scores": [score(p.scorer, text, p.references, p.tags) for p, text in pairs],
            "nll": [None if x is None else round(x, 6) for x in nll],
            "kl": kl,
            "texts": texts,
        }

    def hidden(self, made: Recipe) -> list[Array]:
        """Make the arm's states and run what is behind the prefixes."""
        block, device = self.block, self.device
        if made.kv == "zeros":
            device.zero_kv()
        spans = []
        for row, p in enumerate(block.problems):
            start = p.boundary - made.replayed(p.boundary)
            if start < p.boundary:
                spans.append(Span(row, start, p.boundary, NO_SLOT, self._slot(row), p.boundary))
        for call in block.calls(spans):
            if made.replay == "model":
                device.prefill(block.prefill(call, write=False))
            else:
                device.replay(block.replay(call))
        if made.rows is not None or not spans:
            rows = made.rows if made.rows is not None else np.zeros((), np.bool_)
            rows = np.broadcast_to(rows, device.caches.recurrent.shape[1:-1])
            windows = made.rows is not None
            device.restore(rows, int8=made.int8, keep=bool(spans), windows=windows)
        masked = made.kv == "masked"
        return [
            device.prefill(block.prefill(call, write=True, masked=masked))
            for call in self._suffixes()
        ]

    def _slot(self, row: int) -> int:
        return self.block.layout.rows + row

    def _suffixes(self) -> list[list[Span]]:
        """What is behind the prefixes, a right answer included; the state is kept before that."""
        spans = []
        for row, p in enumerate(self.block.problems):
            end, slot = len(p.prompt), self._slot(row)
            spans.append(Span(row, p.boundary, end + len(p.answer_ids), slot, slot, end))
        return list(self.block.calls(spans))

    def _generate(self, made: Recipe, first: np.ndarray) -> list[str]:
        block = self.block
        batch = block.decode(masked=made.kv == "masked")
        limits = block.by_row([p.max_tokens for p in block.problems])
        steps = self.device.generate(first, limits, batch, self._stopped)
        return [self._text(p, steps[row])[0] for row, p in enumerate(block.problems)]

    def _stopped(self, tokens: np.ndarray) -> Bool[np.ndarray, " N"]:
        """Which rows have their stop string, in however many tokens it came."""
        stops = [
            self._text(p, tokens[row])[1] is not None for row, p in enumerate(self.block.problems)
        ]
        return self.block.by_row(stops).astype(np.bool_)

    def _text(self, problem: Problem, tokens: np.ndarray) -> tuple[str, str | None]:
        """Up to the first ending token or stop string, as the engine cuts it, and that string."""
        tokens = tokens[: problem.max_tokens]
        over = np.flatnonzero(self.device.ends[tokens])
        text = self.encoder.decode(tokens[: over[0] if over.size else None].tolist())
        matcher = StopMatcher(problem.stop)
        final, stop = matcher.push(text)
        return (final, stop) if stop is not None else (final + matcher.finish(), None)


def _kl(values: np.ndarray) -> list[float]:
    """The mean over the suffix, and the values at KL_POSITIONS as far as there are any."""
    at = [values[n - 1] for n in KL_POSITIONS if n <= len(values)]
    return [float(f"{x:.3g}") for x in (values.mean(), *at)]


def _outcomes(
    arm: Arm, made: Recipe, blocks: Sequence[Block], store: Store, tag: str
) -> dict[str, Outcome]:
    found = {}
    for block in blocks:
        cell = store[f"{tag}/{arm.name}/{_digest(block)}"]
        parts = zip(block.problems, cell["scores"], cell["nll"], cell["kl"], strict=True)
        for p, value, nll, (kl, *at) in parts:
            record = {
                "cached": p.boundary if arm.recovery != "off" else 0,
                "new": len(p.prompt) - (p.boundary if arm.recovery != "off" else 0),
                "restored": p.boundary if made.rows is not None else 0,
                "replayed": made.replayed(p.boundary) if arm.recovery != "off" else 0,
                "recovery": arm.recovery,
                "asked": arm.recovery,
            }
            kls: dict[int, float] = dict(zip(KL_POSITIONS, at, strict=False))
            found[f"{p.case}/{p.id}"] = Outcome(value, [record], nll, kl, kls)
    return found
