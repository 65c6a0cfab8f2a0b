"""Generated rows: sizes, weights, and that every answer follows from what stands before it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jhybrid.demo import score
from jhybrid.demo.batches import TASK_NAMES, TASKS, BatchSpec, choose, make_batch
from jhybrid.demo.corpus import Corpus, Text
from jhybrid.demo.rows import (
    ANSWER_WEIGHT,
    BALANCE_LIMITS,
    CONTEXT_WEIGHT,
    DECISIVE,
    PROSE_WEIGHT,
    Row,
)
from jhybrid.demo.score import make_sheet
from jhybrid.demo.stories import make_story
from jhybrid.demo.tasks import COPY_WEIGHT
from jhybrid.demo.tokenizer import END_OF_TEXT, IM_END, TOKENS_USED, build_tokenizer
from jhybrid.demo.trials import TRIALS

SIZES = [257, 513, 1025, 2049]
SEEDS = range(8)
PROSE = ("fiction", "stories")
RECALLED_VERBATIM = ("induction", "registers", "recall", "writes", "chat_recall")
BALANCED = ("registers", "needles", "writes", "variables", "common_words", "frequent_words")


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


def rows(corpus: Corpus, task: str, size: int) -> list[Row]:
    return [TASKS[task](np.random.default_rng((seed, size)), corpus, size) for seed in SEEDS]


TOKENIZER = build_tokenizer()


def text(ids: np.ndarray) -> str:
    return TOKENIZER.decode(ids.tolist(), skip_special_tokens=False)


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


def test_dialogue_is_well_formed(corpus: Corpus) -> None:
    pattern = re.compile(
        r"(<\|im_start\|>system\n[^<]+<\|im_end\|>\n)?"
        r"(<\|im_start\|>user\n[^<]+<\|im_end\|>\n<\|im_start\|>assistant\n[^<]+<\|im_end\|>\n)+"
    )
    ends: set[float] = set()
    for row in rows(corpus, "dialogue", 4097):
        *conversations, _ = text(row.ids).split("<|endoftext|>")  # the last one is cut off
        assert all(pattern.fullmatch(c) for c in conversations)
        ends |= {round(float(w), 6) for w in row.weights[row.ids == IM_END]}
    # the end of a user's turn is given, the end of the assistant's is learned
    assert ends == {CONTEXT_WEIGHT, PROSE_WEIGHT}


def test_held_out_text_is_held_out(folder: Path, corpus: Corpus) -> None:
    def documents(t: Text) -> set[bytes]:
        return {t.document(i).tobytes() for i in range(len(t.documents))}

    assert not documents(corpus.fiction) & documents(corpus.held_out_fiction)
    assert not documents(corpus.stories) & documents(corpus.held_out_stories)
    assert len(corpus.held_out_fiction.documents) == 2
    assert len(corpus.held_out_stories.documents) == 1
    with pytest.raises(FileNotFoundError, match="fiction.txt"):
        Corpus.load(folder / "nowhere")


def test_text_windows(corpus: Corpus) -> None:
    t = corpus.fiction
    assert np.count_nonzero(t.tokens == END_OF_TEXT) == len(t.documents)
    for seed in range(20):
        window = t.window(np.random.default_rng(seed), 300)
        assert len(window) == 300
        assert chr(window[0]).isupper()
    assert len(t.slice(len(t.tokens) - 10, 50)) == 50


def test_story_is_about_its_topics() -> None:
    for seed in range(40):
        story = make_story(np.random.default_rng(seed))
        for topic in story.topics:
            for word in topic.removeprefix("a ").removeprefix("an ").split(" named "):
                assert word in story.text
        assert not re.search(r"[\[\]{}|#]|\ba [aeiou]", story.text)


def test_batch(corpus: Corpus) -> None:
    spec = BatchSpec((3, 1), 256, 8, (("recall", 0.5), ("fiction", 0.25), ("copying", 0.25)))
    batch = make_batch(corpus, spec)
    assert batch.ids.shape == (8, 257)
    assert batch.weights.shape == (8, 256)
    assert Counter(TASK_NAMES[i] for i in batch.task) == {"recall": 4, "fiction": 2, "copying": 2}
    again = make_batch(corpus, spec)
    assert np.array_equal(batch.ids, again.ids)


def test_cuts_lie_where_questions_begin(corpus: Corpus) -> None:
    spec = BatchSpec((5,), 512, 80, (("needles", 0.5), ("writes", 0.5)))
    batch = make_batch(corpus, spec)
    needles = np.array([TASK_NAMES[i] == "needles" for i in batch.task])
    for cut, which in ((batch.state_cut, needles), (batch.key_cut, ~needles)):
        assert np.all(cut[~which] == 512)
        assert 4 <= np.count_nonzero(cut[which] < 512) <= 40
    for ids, *cuts in zip(batch.ids, batch.state_cut, batch.key_cut, strict=True):
        if min(cuts) < 512:
            asked = text(ids[min(cuts) :])
            assert asked.startswith(("Question: What", "What does "))


def test_choose_keeps_to_the_shares() -> None:
    rng = np.random.default_rng(0)
    drawn = Counter(name for _ in range(400) for name in choose(rng, {"a": 0.8, "b": 0.2}, 3))
    assert drawn["a"] / 1200 == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("name", sorted(TRIALS))
@pytest.mark.parametrize("size", [450, 1500])
def test_trials_hold_their_answer(corpus: Corpus, name: str, size: int) -> None:
    for seed in SEEDS:
        trial = TRIALS[name](np.random.default_rng(seed), corpus, size)
        prompt = text(trial.prompt)
        assert re.fullmatch(r"[1-9]\d{4}", trial.expected)
        assert trial.expected in prompt
        assert not prompt.endswith(trial.expected)
        assert size * 0.8 < len(trial.prompt) < size + 60
        assert trial.passed(trial.expected)
        assert not trial.passed("nothing")
