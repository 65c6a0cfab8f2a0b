"""Generated rows: sizes, weights, and that every answer follows from what stands before it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jhybrid.demo import score
from jhybrid.demo.batches import TASK_NAMES, TASKS
from jhybrid.demo.corpus import Corpus
from jhybrid.demo.rows import ANSWER_WEIGHT, BALANCE_LIMITS, DECISIVE, Row
from jhybrid.demo.score import make_sheet
from jhybrid.demo.tasks import COPY_WEIGHT
from jhybrid.demo.tokenizer import TOKENS_USED
from tests.demo.small import rows, text

SIZES = [257, 513, 1025, 2049]
PROSE = ("fiction", "stories")
RECALLED_VERBATIM = ("induction", "registers", "recall", "writes", "chat_recall")
BALANCED = ("registers", "needles", "writes", "variables", "common_words", "frequent_words")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("task", TASK_NAMES)
def test_size_and_weights(corpus: Corpus, task: str, size: int) -> None:
    found = rows(corpus, task, size)
    for row in found:
        assert row.ids.shape == row.weights.shape == (size,)
        assert row.ids.dtype == np.uint16
        assert row.ids.max() < TOKENS_USED
        even = row.weights.copy()
        even[list(row.decisive)] /= DECISIVE
        for start, stop in row.answers:
            assert 0 < start < stop <= size
            assert np.all(even[start:stop] == even[start])
            if task in BALANCED:
                assert BALANCE_LIMITS[0] <= even[start] <= BALANCE_LIMITS[1]
            else:
                assert even[start] in (ANSWER_WEIGHT, COPY_WEIGHT)
        assert row.boundary is None or 0 < row.boundary < size
        inside = np.zeros(size, bool)
        for start, stop in row.answers:
            inside[start:stop] = True
        if task in PROSE:
            assert np.all(row.weights == 1)
        elif task != "dialogue":
            # what is not an answer hardly counts, but for an answer that the end cuts off
            heavy = np.flatnonzero((row.weights > 1) & ~inside)
            assert len(heavy) == 0 or heavy[0] + len(heavy) == size
    if task not in PROSE and not (task == "dialogue" and size < 1000):
        assert np.mean([len(row.answers) for row in found]) >= 1


@pytest.mark.parametrize("task", TASK_NAMES)
def test_same_seed_same_row(corpus: Corpus, task: str) -> None:
    first, second = (TASKS[task](np.random.default_rng(5), corpus, 600) for _ in range(2))
    assert np.array_equal(first.ids, second.ids)
    assert np.array_equal(first.weights, second.weights)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("task", RECALLED_VERBATIM)
def test_answers_stand_earlier_in_the_row(corpus: Corpus, task: str, size: int) -> None:
    for row in rows(corpus, task, size):
        data = row.ids
        for start, stop in row.answers:
            assert text(data[start:stop]) in text(data[:start])


@pytest.mark.parametrize("size", [513, 2049])
def test_recall_asks_for_what_was_said_of_it(corpus: Corpus, size: int) -> None:
    """The words right before the answer name a subject whose statement holds that value."""
    for row in rows(corpus, "recall", size):
        for start, stop in row.answers:
            value = text(row.ids[start:stop])
            said = [s for s in re.split(r"(?<=\.) ", text(row.ids[:start])) if value in s]
            asked = set(re.findall(r"\w+", text(row.ids[max(0, start - 160) : start]).lower()))
            assert said, "the value is told once"
            assert len(asked & set(re.findall(r"[a-z]+", said[0].lower()))) >= 1


@pytest.mark.parametrize("task", ["registers", "writes"])
def test_the_last_value_is_asked_for_by_its_first_digit(corpus: Corpus, task: str) -> None:
    """Its line is the last that names the key, and the first digit weighs more than the rest."""
    for row in rows(corpus, task, 513):
        assert row.boundary is not None
        told, asked = text(row.ids[: row.boundary]), text(row.ids[row.boundary :])
        assert 1 <= len(row.decisive) == len(row.answers)
        for (start, stop), first in zip(row.answers, row.decisive, strict=True):
            digit, value = text(row.ids[first : first + 1]), text(row.ids[start:stop]).strip(" .")
            assert digit == value[0]
            question = asked[: start - row.boundary]
            if task == "registers":
                key = re.split(r"[;\n] ?", question)[-1]
            else:
                key = question.rsplit("The ", 1)[-1].replace(" holds", " now holds ")
            before = told.lower().rsplit(key.lower(), 1)
            assert len(before) == 2
            assert before[1].startswith(value)


def answers(row: Row) -> list[tuple[str, str]]:
    """What stands before each answer, and the answer."""
    return [(text(row.ids[:start]), text(row.ids[start:stop])) for start, stop in row.answers]


@pytest.mark.parametrize("size", [257, 2049])
def test_needles_answer_with_what_the_key_holds(corpus: Corpus, size: int) -> None:
    for row in rows(corpus, "needles", size):
        for before, answer in answers(row):
            found = re.findall(r"Answer: The magic \w+ of (.+?) (?:is|are)$", before)[-1]
            keys = re.split(r", and | and |, ", found)
            block = before[before.rindex("Remember the magic") :]
            told = [v for key in keys for v in re.findall(rf"of {key} is ([\w-]+)\.", block)]
            assert sorted(re.split(r", and | and |, ", answer.strip())) == sorted(told)


@pytest.mark.parametrize("size", [257, 2049])
def test_writes_answer_with_the_last_value(corpus: Corpus, size: int) -> None:
    for row in rows(corpus, "writes", size):
        for before, answer in answers(row):
            holder = re.findall(r"What does (.+?) hold now", before)[-1]
            last = re.findall(rf"{holder} now holds (\d+)\.", before, re.IGNORECASE)[-1]
            assert answer == f" {last}."


@pytest.mark.parametrize("size", [257, 2049])
def test_variables_answer_with_the_chain(corpus: Corpus, size: int) -> None:
    for row in rows(corpus, "variables", size):
        for before, answer in answers(row):
            value = re.findall(r"have the value (\d+): $", before)[-1]
            links = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", before))
            for name in answer.split():
                while not (held := links[name]).isdigit():
                    name = held
                assert held == value
            chain = [name for name in links if links[name] in (value, *answer.split())]
            assert chain == answer.split()


@pytest.mark.parametrize("size", [257, 513, 4097])
def test_common_words_are_those_said_more_than_once(corpus: Corpus, size: int) -> None:
    for row in rows(corpus, "common_words", size):
        assert row.answers
        for before, answer in answers(row):
            listed = before[: before.rindex("\nQuestion")].rsplit("\n", 1)[-1].split()[1::2]
            tally = Counter(listed)
            words = answer.split()[1::2]
            assert set(words) == {word for word, count in tally.items() if count > 1}
            again = [listed.index(word, listed.index(word) + 1) for word in words]
            assert again == sorted(again)


@pytest.mark.parametrize("size", [257, 1025, 4097])
def test_frequent_words_stand_most_often(corpus: Corpus, size: int) -> None:
    for row in rows(corpus, "frequent_words", size):
        for before, answer in answers(row):
            block = before[: before.rindex("\nQuestion")].rsplit("\n", 1)[-1]
            tally = Counter(block.split())
            counts = [tally.pop(word) for word in ("...", *answer.split())]
            assert counts[1:] == sorted(counts[1:], reverse=True)
            assert counts[-1] >= max(tally.values(), default=0)


FORMS = {
    "needles": "niah_multikey_1",
    "writes": "last_write",
    "variables": "vt",
    "common_words": "cwe",
    "frequent_words": "fwe",
}


def form(lines: str) -> set[str]:
    """The lines of a text with everything drawn at random taken out."""
    lines = re.sub(r"[Tt]he magic number of [\w-]+ is( \d+\.)?", "NEEDLE", lines)
    lines = re.sub(r"[Tt]he \w+ \w+ (now holds|hold now|holds)( \d+)?", r"HOLDER \1", lines)
    lines = re.sub(r"magic number of [\w-]+\?", "NEEDLE?", lines)
    lines = re.sub(r"(\d+\. \w+ ?){9,}|((\w{6}|\.\.\.) ){9,}(\w{6}|\.\.\.)", "LIST", lines)
    lines = re.sub(r"VAR [A-Z]{3,5}", "VAR X", lines)
    lines = re.sub(r"\b\d{5}\b", "VALUE", lines)
    return {line for line in lines.split("\n") if len(line) < 120}


@pytest.mark.parametrize("task", FORMS)
def test_rows_have_the_form_of_the_evaluation(corpus: Corpus, folder: Path, task: str) -> None:
    """Every line of a prompt stands in a row of its task, and every line of a row up to its answer
    in a prompt, but for what is drawn."""
    sheet = make_sheet(folder, FORMS[task], 1024, 6)
    prompts = set[str]()
    for ids, spans in zip(sheet.ids, sheet.answers, strict=True):
        prompts |= form(text(ids[: spans[0][0]]))
    trained = set[str]()
    for seed in range(60):
        row = TASKS[task](np.random.default_rng(seed), corpus, 1025)
        if row.boundary is not None and (task != "needles" or "numbers" not in text(row.ids)):
            trained |= form(text(row.ids[: row.answers[0][0]]))
    assert prompts <= trained


def test_score_counts_answers() -> None:
    """By hand: right, wrong, and in another order."""
    right = np.frombuffer(b"go: 1. ab 2. cd 3. ef", np.uint8)[1:]
    spans = ((3, 9), (9, 15), (15, 21))
    assert score._share(right, right, spans, any_order=False) == 1
    wrong = right.copy()
    wrong[13] = ord("x")  # cx in place of cd
    assert score._share(wrong, right, spans, any_order=True) == pytest.approx(2 / 3)
    swapped = right.copy()
    swapped[6] = ord("e")  # the answer at 3. may come first, and cannot come again at the end
    assert score._share(swapped, right, spans, any_order=True) == 1
    assert score._share(swapped, right, spans, any_order=False) == pytest.approx(2 / 3)


def test_copying_repeats(corpus: Corpus) -> None:
    for row in rows(corpus, "copying", 1025):
        for start, stop in row.answers:
            assert text(row.ids[start:stop]) in text(row.ids[:start])
