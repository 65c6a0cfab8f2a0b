"""Scores against cases worked out by hand, and against the packages that the benchmarks use."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import rouge
from rouge_score import rouge_scorer

from jhybrid.eval.scoring.answers import answers_equal, grader, math_correct, needs_judge
from jhybrid.eval.scoring.boxed import final_answer
from jhybrid.eval.scoring.choice import last_letter, mmlu_pro_letter
from jhybrid.eval.scoring.rouge import rouge_l
from jhybrid.eval.scoring.statistics import (
    estimate,
    mean_and_sample_sd,
    median_and_iqr,
    paired_difference,
)
from jhybrid.eval.scoring.text import (
    clean,
    normalize,
    string_match_all,
    string_match_part,
    token_f1,
)


def test_string_matches():
    assert string_match_all("They are 12 and ABC.", ["12", "abc", "34", "x9"]) == 0.5
    assert string_match_all("none", ["12"]) == 0
    assert string_match_part("paris, France", ["Lyon", "Paris"]) == 1
    assert string_match_part("London", ["Lyon", "Paris"]) == 0
    assert clean(" a\tb\x00c \n") == "a\nb\nc"


def test_token_f1():
    assert normalize("The  cat's, (an) Apple!") == "cats apple"
    assert token_f1("The answer: Paris", ["paris"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    # the multiset counts: one "a b" of two
    assert token_f1("dog dog", ["dog"]) == pytest.approx(2 / 3)
    assert token_f1("x", ["y", "x z"]) == pytest.approx(2 / 3)
    assert token_f1("", ["y"]) == 0
    assert token_f1("a the", ["an"]) == 0


def test_rouge_l_by_hand():
    # five distinct words on either side, four of them on the subsequence
    assert rouge_l("a cat sat on mat", ["the cat sat on the mat"]) == pytest.approx(0.8, abs=1e-7)
    assert rouge_l("", ["the cat"]) == 0
    assert rouge_l("Cat", ["cat"]) == 0  # no lower-casing
    assert rouge_l("x. cat sat", ["nothing", "the cat sat"]) == pytest.approx(0.8 / 1.0 * 5 / 6)


def test_rouge_l_is_that_of_the_package():
    rng = random.Random(0)
    words = ["the", "cat", "Cat", "sat", "on", "a", "mat", "and", "ran", "home"]
    for _ in range(300):

        def text() -> str:
            pieces = [" ".join(rng.choices(words, k=rng.randint(1, 8))) for _ in range(3)]
            return rng.choice([". ", ".", " .  "]).join(pieces) + rng.choice(["", ".", ". "])

        hypothesis, reference = text(), text()
        package: Any = rouge.Rouge().get_scores([hypothesis], [reference])
        expected = package[0]["rouge-l"]["f"]
        assert rouge_l(hypothesis, [reference]) == pytest.approx(expected, abs=1e-12)


def test_rouge_l_is_not_googles():
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    score = scorer.score("the cat sat on the mat", "a cat sat on mat")["rougeL"]
    assert (score.precision, score.recall) == (pytest.approx(0.8), pytest.approx(4 / 6))
    # one sentence, every word once: there they agree, but for the 1e-8
    same = scorer.score("red green blue", "red blue")["rougeL"].fmeasure
    assert rouge_l("red blue", ["red green blue"]) == pytest.approx(same, abs=1e-7)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("So the answer is (C).", "C"),
        ("the answer is D, though answer: B", "D"),
        ("Answer: B\nAnswer: E because", "B"),
        ("answer: F or Answer: G", "G"),  # the last on the line
        ("A, then B, finally J", "J"),
        ("the answer is (K)", None),
        ("nothing", None),
    ],
)
def test_mmlu_pro_letter(text: str, letter: str | None):
    assert mmlu_pro_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: A. On reflection, answer: B", "B"),
        ("The answer is **(C)**", "C"),
        (r"\boxed{D}", "D"),
        ("(A) is wrong, (B) is right", "B"),
        ("It must be C", "C"),
        ("answer: E", None),  # four options only
        ("Answer: Because", None),
    ],
)
def test_last_letter(text: str, letter: str | None):
    assert last_letter(text, 4) == letter


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{\boxed{7}}", "7"),
        (r"\boxed{ {a} \} }", r"{a} \}"),
        ("it is 12, no, -13", "-13"),
        (r"open \boxed{3", "3"),
        ("none", None),
    ],
)
def test_final_answer(text: str, answer: str | None):
    assert final_answer(text) == answer


def test_final_answer_of_a_list_takes_all_boxes_of_the_last_line():
    text = "\\boxed{0}\nSo \\boxed{1} and \\boxed{2}."
    assert final_answer(text, is_list=True) == "1,2"


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [
        ("0042", "42"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"$\left(1, 2\right)$", "(1,2)"),
        (r"x = \dfrac{1}{2}", r"\frac12"),
        (r"\frac{1}{2}", "0.5"),
        ("3, 1 and 2", "1,2,3"),
        (r"90^\circ", "90"),
        (r"\text{ 7 }.", "7"),
    ],
)
def test_equal_answers(predicted: str, gold: str):
    assert answers_equal(predicted, gold)


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [("41", "42"), ("1,2", "1,2,3"), ("(2,1)", "(1,2)"), ("1,1,2", "1,2,2"), ("0.3333", "1/3")],
)
def test_different_answers(predicted: str, gold: str):
    assert not answers_equal(predicted, gold)


def test_closed_forms_with_math_verify():
    assert grader() == "math-verify"
    assert answers_equal("2^{16}+1", "65537")
    assert answers_equal(r"\sqrt{8}", r"2\sqrt{2}")
    assert answers_equal(r"\lfloor \log_2 a \rfloor + 1", r"1+\left\lfloor \log_{2}a\right\rfloor")
    assert not answers_equal(r"\sqrt{8}", r"3\sqrt{2}")


def test_answers_in_words_need_a_judge():
    assert needs_judge("all powers of 2") and needs_judge(r"\text{even } n")
    assert not needs_judge(r"$\left\lfloor \log_{2}a\right\rfloor +1$.")
    assert not needs_judge(r"\frac{\sqrt{3}}{2}") and not needs_judge("(1, 2)")
    assert math_correct(r"so \boxed{All powers of 2}", "All powers of 2")


def test_math_correct():
    assert math_correct("Thus $\\boxed{113}$.", "113")
    assert not math_correct("Thus $\\boxed{112}$.", "113")
    assert math_correct("we get 7", "7") and not math_correct("no number", "7")


def test_statistics():
    assert estimate([0, 1, 1, 0]) == (0.5, pytest.approx(math.sqrt(1 / 3) / 2), 4)
    assert mean_and_sample_sd([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert math.isnan(mean_and_sample_sd([1.0])[1])
    found = paired_difference([1, 1, 0, 1], [1, 0, 0, 0])
    assert (found.mean, found.n) == (0.5, 4)
    assert found.low <= 0.5 <= found.high and found == paired_difference([1, 1, 0, 1], [1, 0, 0, 0])
    with pytest.raises(ValueError, match="share their problems"):
        paired_difference([1, 2], [1])
    assert median_and_iqr([1, 2, 3, float("nan")]) == (2.0, 1.5, 2.5)
