"""What the trained model is asked in its evaluation: fresh prompts, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .corpus import Corpus
from .dialogue import Chat
from .rows import RowBuilder
from .tasks import haystack, hide, recall_row
from .tokenizer import IM_START
from .wording import Rng, between, digits, facts, pick, statement


@dataclass(frozen=True)
class Trial:
    """A prompt whose continuation must hold `expected` (at its very start, unless `anywhere`)."""

    prompt: np.ndarray
    expected: str
    anywhere: bool = False

    def passed(self, reply: str) -> bool:
        return self.expected in reply if self.anywhere else reply.startswith(self.expected)


TrialMaker = Callable[[Rng, Corpus, int], Trial]


def one_number(rng: Rng, corpus: Corpus, size: int) -> Trial:
    """A 5-digit number told once in essays the model never saw, asked for at the end."""
    return _asked_of(rng, corpus, size, 1)


def four_numbers(rng: Rng, corpus: Corpus, size: int) -> Trial:
    """Four such numbers, one of them asked for."""
    return _asked_of(rng, corpus, size, 4)


def _asked_of(rng: Rng, corpus: Corpus, size: int, count: int) -> Trial:
    known = [replace(fact, value=digits(rng, 5)) for fact in facts(rng, count)]
    row = recall_row(rng, corpus.essays, size, known, [known[between(rng, 0, count - 1)]])
    start, stop = row.answers[0]
    return Trial(row.ids[:start], bytes(row.ids[start:stop].astype(np.uint8)).decode())


UNSEEN_WORDINGS = (
    ("The combination of the vault is {v}.", "\nThe combination of the vault is "),
    ("Agent Smith will wait at gate {v}.", "\nAgent Smith will wait at gate "),
    (
        "The treasure lies {v} steps from the old oak.",
        "\nHow many steps from the old oak does the treasure lie? The treasure lies ",
    ),
    ("The ship left port with {v} barrels.", "\nThe ship left port with "),
    ("Her library card says {v}.", "\nWhat does her library card say? Her library card says "),
    ("My account was opened under {v}.", "\nMy account was opened under "),
)


def unseen_wording(rng: Rng, corpus: Corpus, size: int) -> Trial:
    """The same in sentences unlike any in training."""
    told, asked = UNSEEN_WORDINGS[between(rng, 0, len(UNSEEN_WORDINGS) - 1)]
    value = digits(rng, 5)
    row = RowBuilder(size)
    hay = haystack(rng, corpus.essays, size - len(told) - len(asked))
    hide(rng, row, hay, [told.format(v=value)])
    return Trial(row.add(asked).ids(), value)


def in_chat(rng: Rng, corpus: Corpus, size: int) -> Trial:
    """A user gives a text with a number in it and asks for the number."""
    (fact,) = facts(rng, 1)
    fact = replace(fact, value=digits(rng, 5))
    body = RowBuilder(size)
    hide(rng, body, haystack(rng, corpus.essays, max(size - 120, 2)), [statement(rng, fact)])
    row = RowBuilder(size)
    start = pick(rng, ("What is {}?", "What was {}?", "Tell me {}."))
    Chat(row).user(f"{body.text()}\n\n{start.format(fact.phrase)}")
    row.add(IM_START).add("assistant\n")
    return Trial(row.ids(), fact.value, anywhere=True)


TRIALS: dict[str, TrialMaker] = {
    "one_number": one_number,
    "unseen_wording": unseen_wording,
    "in_chat": in_chat,
    "four_numbers": four_numbers,
}

SKILLS = ("induction", "copying")

MISSING = "left out: no time"  # stands for a measurement
TEMPERATURE = 0.6  # of the samples
PROMPTS = (  # (a user's message or None, text that the model continues)
    (None, "Once upon a time"),
    (None, "One day, a little girl named"),
    ("Tell me a story about a brave rabbit.", ""),
    ("Write a short story about a boy named Tom and a red kite.", ""),
    ("Hello!", ""),
    ("My name is Clara. What is my name?", ""),
    ("What colour is the sky?", ""),
    ("Can you tell me a story?", ""),
)


def sample_prompt(user: str | None, start: str) -> np.ndarray:
    row = RowBuilder(0)
    if user is not None:
        Chat(row).user(user)
        row.add(IM_START).add("assistant\n")
    return row.add(start).ids()
