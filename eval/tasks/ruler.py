"""All RULER subtasks (and the order tasks) at any length, with any tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from jhybrid.config import require

from .counting import (
    CommonWordsTask,
    Frequencies,
    FrequentWordsTask,
    common_words_draft,
    frequency_levels,
    frequent_words_draft,
)
from .haystacks import Essay
from .niah import NEEDLES, NeedleTask, needle_draft
from .order import ORDER, OrderTask, order_draft
from .problem import Boundary, Draft, Encoder, Problem, largest_that_fits
from .reading import Passages, ReadingTask, load_passages, reading_draft
from .tracking import TrackingTask, tracking_draft
from .wording import Template, Wording
from .words import Words

Task = NeedleTask | TrackingTask | CommonWordsTask | FrequentWordsTask | ReadingTask | OrderTask
Make = Callable[[int, int], Draft]  # (units, index)

TASKS: dict[str, Task] = {
    **NEEDLES,
    "vt": TrackingTask(),
    "cwe": CommonWordsTask(),
    "fwe": FrequentWordsTask(),
    "qa_1": ReadingTask("squad"),
    "qa_2": ReadingTask("hotpotqa_dev"),
}
EXTRA_TASKS: dict[str, Task] = dict(ORDER)
SUBTASKS = tuple(TASKS)  # the 13 of RULER
EXAMPLE_TOKENS = 500
_LEAST = {CommonWordsTask: 10, FrequentWordsTask: 60}  # units; one for the others


@dataclass(frozen=True)
class Ruler:
    """Makes problems. `max_tokens` None takes each task's own number of tokens to generate."""

    encoder: Encoder
    wording: Wording
    words: Words
    data: Path | None
    seed: int = 42
    max_tokens: int | None = None

    @cached_property
    def essay(self) -> Essay:
        return Essay.load(self.data)

    @cached_property
    def passages(self) -> dict[str, Passages]:
        return {}

    def problems(
        self, name: str, length: int, count: int, boundary: Boundary = "context"
    ) -> Iterator[Problem]:
        """`count` problems whose prompt and output together have at most `length` tokens."""
        for draft in self.drafts(name, length, count):
            yield self.encoder.freeze(draft, f"{name}/{length}", boundary)

    def at_depths(
        self,
        name: str,
        length: int,
        count: int,
        depths: tuple[int, ...],
        boundary: Boundary = "context",
    ) -> Iterator[Problem]:
        """`count` problems at each depth (per cent) of a single-needle task."""
        task = NEEDLES.get(name)
        single = task is not None and task.keys * task.values == 1
        require(single, "task", name, "a task of a single needle")
        assert task is not None
        for depth in depths:
            for draft in self._sized(task, [self._needles(task, depth)], length, count):
                yield self.encoder.freeze(draft, f"{name}/{length}", boundary)

    def drafts(self, name: str, length: int, count: int) -> Iterator[Draft]:
        known = {**TASKS, **EXTRA_TASKS}
        require(name in known, "task", name, f"one of {', '.join(known)}")
        task = known[name]
        yield from self._sized(task, self._makers(name, task, length), length, count)

    def _sized(self, task: Task, makes: list[Make], length: int, count: int) -> Iterator[Draft]:
        """Each draw has as many units as fit; of several forms the first that fits is used.

        (RULER takes units off in large steps where a draw is too long; searching anew keeps
        prompts nearer to the length.) Reading questions too long for the length are passed over.
        """
        generated = self.max_tokens if self.max_tokens is not None else task.max_tokens
        room = length - generated
        least = _LEAST.get(type(task), 1)
        make = next((m for m in makes if self._fits(m, least, 0, room)), makes[-1])
        most, made, index = 0, 0, 0
        while made < count:
            if isinstance(task, ReadingTask) and not self._fits(make, least, index, room):
                index += 1
                left = len(self._passages(task.source).questions) - index
                require(left > 0, "length", length, f"room for {count} questions of {task.source}")
                continue
            most = most or self._units(make, index, room, least, self._most(task, length, make))
            units = most
            if not self._fits(make, units, index, room):
                units = self._units(make, index, room, least, units)
            yield replace(make(units, index), max_tokens=generated, stop=self.wording.stop)
            made, index = made + 1, index + 1

    def _fits(self, make: Make, units: int, index: int, room: int) -> bool:
        return self.encoder.length(make(units, index)) <= room

    def _units(self, make: Make, index: int, room: int, least: int, most: int) -> int:
        return largest_that_fits(
            lambda units: self.encoder.length(make(units, index)), room, least, most
        )

    def _most(self, task: Task, length: int, make: Make) -> int:
        """More units than can fit: three times what their measured size would allow."""
        if isinstance(task, ReadingTask):
            return len(self._passages(task.source).documents)
        if isinstance(task, CommonWordsTask):
            return min(len(self.words.pool), 2 * length)
        least = _LEAST.get(type(task), 1)
        few, more = (self.encoder.length(make(n, 0)) for n in (least, least + 20))
        return least + int(60 * length / max(more - few, 1))

    def _makers(self, name: str, task: Task, length: int) -> list[Make]:
        """The forms of a task, the published one first."""
        seed, words = self.seed, self.words
        match task:
            case NeedleTask():
                return [self._needles(task, None)]
            case TrackingTask():
                return self._tracking(task, length)
            case CommonWordsTask():
                text = self.wording.task("cwe")
                return [
                    partial(_common_words, task, seed, words, text, level)
                    for level in frequency_levels(length)
                ]
            case FrequentWordsTask():
                text = self.wording.task("fwe")
                return [
                    lambda units, index: frequent_words_draft(
                        task, units, index, seed, length, text
                    )
                ]
            case ReadingTask():
                text, passages = self.wording.task("qa"), self._passages(task.source)
                return [
                    lambda units, index: reading_draft(task, units, index, seed, passages, text)
                ]
            case OrderTask():
                text = self.wording.task("order")
                return [lambda units, index: order_draft(task, units, index, seed, words, text)]

    def _needles(self, task: NeedleTask, depth: int | None) -> Make:
        text = self.wording.task("niah")
        essay = self.essay if task.haystack == "essay" else None
        return lambda units, index: needle_draft(
            task, units, index, self.seed, self.words, text, essay, depth
        )

    def _tracking(self, task: TrackingTask, length: int) -> list[Make]:
        """With a solved example of about 500 tokens, if that is at most a quarter of the length."""
        text = self.wording.task("vt")

        def make(example: int, units: int, index: int) -> Draft:
            return tracking_draft(task, units, index, self.seed, text, example)

        bare = partial(make, 0)
        shown = max((n for n in range(1, 100) if self._fits(bare, n, 0, EXAMPLE_TOKENS)), default=1)
        forms = [partial(make, shown), bare]
        return forms if 4 * self.encoder.length(bare(shown, 0)) <= length else forms[1:]

    def _passages(self, source: str) -> Passages:
        if source not in self.passages:
            self.passages[source] = load_passages(self.data, source)
        return self.passages[source]


def _common_words(
    task: CommonWordsTask,
    seed: int,
    words: Words,
    text: Template,
    level: Frequencies,
    units: int,
    index: int,
) -> Draft:
    return common_words_draft(task, units, index, seed, words, text, level)
