"""Generated problems: their lengths, that they are repeatable, and that their answers are right."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jhybrid.eval.tasks.haystacks import DEPTHS, Essay, insert_in_lines
from jhybrid.eval.tasks.problem import Draft, Encoder, largest_that_fits
from jhybrid.eval.tasks.ruler import EXTRA_TASKS, SUBTASKS, TASKS, Ruler
from jhybrid.eval.tasks.wording import Wording
from jhybrid.eval.tasks.words import load_words
from tests.byte_tokenizer import byte_tokenizer
from tests.eval.data_files import write_data

MERGES = [("t", "h"), ("th", "e"), ("i", "s"), ("a", "n"), ("an", "d")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def ruler(
    data: Path | None, wording: str = "ruler", *, chat: bool = False, **options: Any
) -> Ruler:
    encoder = Encoder(byte_tokenizer(merges=MERGES), chat=chat)
    return Ruler(encoder, Wording(wording), load_words(), data, **options)


def drafts(
    data: Path, name: str, length: int = 2048, count: int = 3, **options: Any
) -> list[Draft]:
    return list(ruler(data, **options).drafts(name, length, count))


def test_there_are_thirteen_subtasks_with_the_published_output_lengths():
    found = {name: task.max_tokens for name, task in TASKS.items()}
    assert len(SUBTASKS) == 13
    assert [found[name] for name in ("vt", "cwe", "fwe", "qa_1", "qa_2")] == [30, 120, 50, 32, 32]
    assert {found[name] for name in found if name.startswith("niah")} == {128}


@pytest.mark.parametrize("wording", ["ruler", "plain"])
@pytest.mark.parametrize("name", [*TASKS, *EXTRA_TASKS])
def test_lengths_are_those_asked_for(data: Path, name: str, wording: str):
    for length in (1500, 4096):
        maker = ruler(data, wording)
        problems = list(maker.problems(name, length, 3))
        totals = [len(p.prompt) + p.max_tokens for p in problems]
        assert max(totals) <= length
        if not name.startswith("qa"):  # the little data there is cannot fill them
            assert min(totals) > 0.9 * length, totals
        assert len({p.digest for p in problems}) == len({p.id for p in problems}) == 3
        assert all(0 < p.boundary < len(p.prompt) for p in problems)


@pytest.mark.parametrize("name", [*TASKS, *EXTRA_TASKS])
def test_the_same_seed_gives_the_same_problems(data: Path, name: str):
    first, again, other = (
        drafts(data, name, seed=seed, count=2, wording="plain") for seed in (7, 7, 8)
    )
    assert first == again
    assert name.startswith("qa") or first != other


@pytest.mark.parametrize("name", [n for n in TASKS if n.startswith("niah")])
def test_needles_stand_in_the_haystack_once(data: Path, name: str):
    task: Any = TASKS[name]
    for draft in drafts(data, name):
        assert len(draft.references) == task.queries * task.values
        for answer in draft.references:
            assert len(re.findall(rf"is: {re.escape(answer)}\.", draft.context)) == 1
            assert answer not in draft.question
        told = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", draft.context)
        known = {value: key for kind, key, value in told}
        assert all(known[answer] in draft.answer_prefix for answer in draft.references)
        assert {kind for kind, _, _ in told} == {task.value_kind}
        if task.haystack != "needle":
            assert len(told) == task.keys * task.values
        assert draft.answer_prefix.endswith(" are" if len(draft.references) > 1 else " is")


def test_values_have_their_kinds(data: Path):
    (number,) = drafts(data, "niah_single_1", count=1)[0].references
    (uuid,) = drafts(data, "niah_single_3", count=1)[0].references
    assert re.fullmatch(r"[1-9]\d{6}", number)
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuid
    )


def test_needles_at_given_depths(data: Path):
    made = list(ruler(data).at_depths("niah_single_1", 2048, 2, (0, 50, 100)))
    assert [p.id for p in made] == ["0@0", "1@0", "0@50", "1@50", "0@100", "1@100"]
    places = []
    for problem in made[::2]:
        text = ruler(data).encoder.decode(problem.prefix)
        lines = text.strip().split("\n")[1:]  # the first is the instruction
        places.append(next(i for i, x in enumerate(lines) if "magic" in x) / (len(lines) - 1))
    assert places == [0, pytest.approx(0.5, abs=0.05), 1]
    with pytest.raises(ValueError, match="single needle"):
        list(ruler(data).at_depths("niah_multikey_1", 2048, 1, (0,)))


def test_insertion_keeps_units_and_order():
    rng = np.random.default_rng(0)
    for count in (0, 1, 3, 20):
        units = [f"u{i}" for i in range(count)]
        lines = insert_in_lines(rng, units, ["n0", "n1", "n2"], None).split("\n")
        assert [x for x in lines if x[0] == "u"] == units
        assert [x for x in lines if x[0] == "n"] == ["n0", "n1", "n2"]
    assert len(DEPTHS) == 40 and DEPTHS[0] == 0 and DEPTHS[-1] == 100


def test_tracked_variables_are_those_of_the_chain(data: Path):
    for length, shown in ((2048, 1), (1024, 0)):
        for draft in drafts(data, "vt", length):
            own = draft.context.rpartition("keep track of what each variable holds")[2]
            value = re.findall(r"value (\d{5})", draft.question)[0]
            held = {}
            for name, start, before in re.findall(r"VAR (\w+) = (?:(\d+)|VAR (\w+))", own):
                held[name] = start or held[before]
            assert {n for n, v in held.items() if v == value} == set(draft.references)
            assert len(draft.references) == 5
            assert draft.context.count("5 variables hold") == shown  # the solved example


def test_common_words_are_the_most_common(data: Path):
    for length, (often, seldom, example) in (
        (16384, (30, 3, 1)),
        (2500, (6, 1, 1)),
        (1024, (6, 1, 0)),
        (800, (4, 1, 0)),
    ):
        (draft,) = drafts(data, "cwe", length, 1, wording="plain")
        *before, own = draft.context.split("Remember the most common words.\n")
        counts = Counter(re.findall(r"\d+\. (\S+)", own))
        assert {w for w, n in counts.items() if n == often} == set(draft.references)
        assert set(counts.values()) == {often, seldom}
        assert len(before) == 1 + example  # the text before the first instruction is empty
        assert draft.tags["example"] == bool(example)


def test_frequent_words_follow_the_law(data: Path):
    for draft in drafts(data, "fwe", 8192):
        words = draft.context.rpartition("'...'.\n")[2].split()
        counts = Counter(words).most_common(5)
        assert counts[0][0] == "..."
        assert {word for word, _ in counts[1:4]} == set(draft.references)
        # shares of the ranks: 60.8 % noise, then 15.2 %, 6.8 %, 3.8 %
        shares = [n / len(words) for _, n in counts[:4]]
        assert shares == pytest.approx([0.632, 0.158, 0.070, 0.0395], rel=0.1)


def test_reading_puts_the_answer_among_documents(data: Path):
    for name in ("qa_1", "qa_2"):
        for draft in drafts(data, name):
            assert draft.references[0] in draft.context
            numbers = [int(n) for n in re.findall(r"Document (\d+):\n", draft.context)]
            assert numbers == list(range(1, len(numbers) + 1))
    first = drafts(data, "qa_1", count=1)[0]
    assert first.references == ("Marta Quill",)  # said twice, listed once
    with pytest.raises(ValueError, match="questions of squad"):
        drafts(data, "qa_1", length=310, count=3)


def test_answers_that_need_order_are_right(data: Path):
    for draft in drafts(data, "last_write", wording="plain"):
        holder = re.findall(r"What does (the .*) hold now", draft.question)[0]
        written = re.findall(rf"{holder.capitalize()} now holds (\d+)\.", draft.context)
        assert (written[-1],) == draft.references and len(written) > 2
    for name in ("kth_item", "next_item"):
        for draft in drafts(data, name, wording="plain"):
            items = re.findall(r"Then came (\d+)\.", draft.context)
            asked = int(re.findall(r"\d+", draft.question)[0])
            at = len(items) - asked if name == "kth_item" else items.index(str(asked)) - 1
            assert draft.references == (items[at],)


def test_essays_are_used_again_when_too_short():
    essay = Essay("One two three. Four five!")
    assert " ".join(essay.sentences(12)).split() == ("One two three. Four five! ".split() * 3)[:12]
    assert essay.sentences(5) == ["One two three.", "Four five!"]
    with pytest.raises(ValueError, match="no words"):
        Essay("  ")


def test_a_length_without_room_is_refused(data: Path):
    with pytest.raises(ValueError, match="the shortest prompt has"):
        drafts(data, "niah_single_1", length=300)
    with pytest.raises(ValueError, match="task"):
        drafts(data, "niah_9")
    assert largest_that_fits(lambda n: 3 * n, 31, 1, 100) == 10


def test_a_missing_file_says_which_and_where():
    with pytest.raises(FileNotFoundError, match="paulgraham"):
        list(ruler(None).drafts("niah_single_2", 2048, 1))
    with pytest.raises(FileNotFoundError, match="dev-v2.0.json"):
        list(ruler(Path("/nowhere")).drafts("qa_1", 2048, 1))


def test_boundaries_and_chat(data: Path):
    encoder = Encoder(byte_tokenizer(), chat=True)
    draft = Draft("0", "context", "question", " prefix", ("a",), "token_f1", 4)
    whole, at_question = (encoder.freeze(draft, "c", b) for b in ("context", "question"))
    assert whole.prompt == at_question.prompt
    assert encoder.decode(whole.prefix).endswith("context")
    text = byte_tokenizer().decode(list(whole.prompt))
    assert text == ("<|im_start|>user\ncontextquestion<|im_end|>\n<|im_start|>assistant\n prefix")
    assert at_question.boundary == len(whole.prompt) - len(" prefix")
    assert whole.digest != at_question.digest
    bare = encoder.freeze(Draft("0", "c", "q", "", ("a",), "token_f1", 4), "c", "question")
    assert bare.boundary == len(bare.prompt) - 1  # one token is left to run


def test_seeds_differ_by_problem_and_replay_and_not_by_arm(data: Path):
    a, b = ruler(data).problems("fwe", 1500, 2)
    seeds = {p.seed(0, replay) for p in (a, b) for replay in range(3)}
    assert len(seeds) == 6 and a.seed(0, 1) == a.seed(0, 1) != a.seed(1, 1)


def test_wording_can_be_replaced(tmp_path: Path, data: Path):
    (tmp_path / "fwe.json").write_text(
        json.dumps({"instruction": "Zähle.", "question": "Welche?", "prefix": " Es sind"})
    )
    (draft,) = ruler(data, str(tmp_path)).drafts("fwe", 1500, 1)
    assert draft.context.startswith("Zähle.\n") and draft.answer_prefix == " Es sind"
    assert next(iter(ruler(data, str(tmp_path)).drafts("vt", 1500, 1))).question  # from the bundled
    (tmp_path / "fwe.json").write_text(json.dumps({"instruction": "{who}"}))
    template = Wording(str(tmp_path)).task("fwe")
    with pytest.raises(ValueError, match="who"):
        template.text("instruction", name="x")
    with pytest.raises(ValueError, match="question"):
        template.raw("question")
    with pytest.raises(ValueError, match="wording"):
        Wording("nowhere")


def test_words_of_the_package_are_rulers(data: Path):
    words = load_words("wonderwords")
    sizes = [len(x) for x in (words.pool, words.nouns, words.adjectives)]
    assert sizes == [8166, 6782, 912]  # of wonderwords 3.0.1
    assert len(set(load_words().pool)) == len(load_words().pool) > 5000
    with pytest.raises(ValueError, match="words"):
        load_words("nowhere.json")
