"""What rows are made of and batches made of them: text, stories, conversations, shares."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jhybrid.demo.batches import TASK_NAMES, BatchSpec, choose, make_batch
from jhybrid.demo.corpus import Corpus, Text
from jhybrid.demo.rows import CONTEXT_WEIGHT, PROSE_WEIGHT
from jhybrid.demo.stories import make_story
from jhybrid.demo.tokenizer import END_OF_TEXT, IM_END
from jhybrid.demo.trials import TRIALS
from tests.demo.small import SEEDS, rows, text


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
