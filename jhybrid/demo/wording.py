"""Words and phrasings from which rows are made: lists, facts to hide, and how to ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Rng = np.random.Generator

ADJECTIVES = """
red blue green yellow purple orange black white brown grey pink golden silver old young tiny small
little big huge tall short quick slow happy sad angry brave shy kind clever silly lazy busy quiet
loud hungry sleepy warm cold wet dry soft hard bright dark clean dirty round flat sharp broken
shiny wooden paper iron glass secret hidden lost magic strange funny gentle wild tame fresh sweet
bitter salty smooth rough heavy light thick thin empty full rusty dusty striped spotted lonely
proud calm early
""".split()
ANIMALS = """
fox dog cat bear rabbit mouse horse cow pig duck goose hen frog turtle owl crow robin lion tiger
elephant monkey zebra giraffe camel goat sheep lamb wolf deer squirrel hedgehog badger otter
beaver whale dolphin shark fish crab snail ant bee butterfly spider parrot penguin donkey kitten
puppy
""".split()
THINGS = """
ball book box chair table lamp door window key bell clock cup plate spoon bottle basket bucket
drum kite boat train car truck bike wagon ladder rope hat coat shoe scarf glove ring coin stone
shell feather leaf flower tree candle mirror pencil brush blanket pillow doll puppet robot rocket
cake cookie apple pear lemon carrot potato pie honey cheese button ribbon map letter flag whistle
umbrella
""".split()
PLACES = """
park forest garden kitchen school farm beach river lake hill mountain cave castle village town
market shop library barn bridge island harbour station museum bakery meadow desert attic cellar
street
""".split()
COLOURS = "red blue green yellow purple orange black white brown pink grey silver".split()
FOODS = """
apples bread cheese cake soup rice pasta pizza honey cookies pancakes carrots plums pears fish
eggs noodles berries beans toast cherries porridge grapes nuts
""".split()
BOYS = """
Tom Ben Sam Max Tim Jack Leo Noah Finn Oscar Hugo Peter Paul Adam Luke Henry George Arthur Felix
Otto Ravi Omar Kenji Diego Ivan Pablo Marco Anton Erik Jonas
""".split()
GIRLS = """
Lily Anna Mia Sara Lucy Emma Zoe Nora Ruby Ella Rosa Clara Alice Jane Molly Daisy Sophie Hannah
Maya Ines Leila Yuki Priya Olga Freya Greta Marta Nina Eva Lola
""".split()
NAMES = BOYS + GIRLS
PETS = (
    "Rex Spot Whiskers Biscuit Pepper Shadow Luna Coco Ginger Bubbles Pip Socks Mango Tiger".split()
)
WORDS = ADJECTIVES + ANIMALS + THINGS + PLACES + FOODS

ATTRIBUTES = """
number|number|number|code|secret code|secret number|password|magic number|special number|key|PIN
ticket number|locker code|phone number|room number|lucky number|score|price|passcode|pass key|answer
""".replace("\n", "|")
ATTRIBUTE_LIST = [a for a in ATTRIBUTES.split("|") if a]


T = TypeVar("T")


def pick(rng: Rng, items: Sequence[T]) -> T:
    """One of `items`; much cheaper than `rng.choice` on a list of strings."""
    return items[int(rng.random() * len(items))]


def chance(rng: Rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def between(rng: Rng, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included."""
    return low + int(rng.random() * (high - low + 1))


def digits(rng: Rng, count: int | None = None) -> str:
    """A number without leading zero; without `count` mostly five digits, else two to eight."""
    if count is None:
        count = 5 if chance(rng, 0.65) else between(rng, 2, 8)
    return str(between(rng, 10 ** (count - 1), 10**count - 1))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Fact:
    """`subject` has `attribute` with `value`, e.g. the number of the red fox is 48213."""

    attribute: str
    subject: str  # "" for a fact that stands alone: "the secret code is 48213"
    value: str

    @property
    def phrase(self) -> str:
        return (
            f"the {self.attribute} of {self.subject}" if self.subject else f"the {self.attribute}"
        )

    @property
    def possessive(self) -> str:
        return f"{self.subject}'s {self.attribute}" if self.subject else f"your {self.attribute}"


def subject(rng: Rng) -> str:
    kind = rng.random()
    if kind < 0.5:
        return f"the {pick(rng, ADJECTIVES)} {pick(rng, ANIMALS + THINGS)}"
    if kind < 0.7:
        return f"the {pick(rng, ANIMALS + THINGS + PLACES)}"
    if kind < 0.9:
        return pick(rng, NAMES)
    return f"{pick(rng, ADJECTIVES)}-{pick(rng, ANIMALS + THINGS)}"


def facts(rng: Rng, count: int) -> list[Fact]:
    """`count` facts that no question confuses: one attribute of many subjects, or all differ."""
    if count == 1 and chance(rng, 0.35):
        return [Fact(pick(rng, ATTRIBUTE_LIST), "", digits(rng))]
    shared = pick(rng, ATTRIBUTE_LIST) if chance(rng, 0.6) else None
    size = None if chance(rng, 0.3) else (5 if chance(rng, 0.75) else between(rng, 3, 7))
    found: dict[tuple[str, str], Fact] = {}
    values: set[str] = set()
    while len(found) < count:
        fact = Fact(shared or pick(rng, ATTRIBUTE_LIST), subject(rng), digits(rng, size))
        if fact.value not in values:
            values.add(fact.value)
            found.setdefault((fact.attribute, fact.subject), fact)
    return list(found.values())


STATEMENTS = (
    "{Phrase} is {v}.",
    "{Phrase} is {v}.",
    "{Phrase} is {v}.",
    "Remember that {phrase} is {v}.",
    "Remember this: {phrase} is {v}.",
    "Do not forget that {phrase} is {v}.",
    "Note that {phrase} is {v}.",
    "Here is something important: {phrase} is {v}.",
    "{Phrase}: {v}.",
    "By the way, {phrase} is {v}.",
    "It is written that {phrase} is {v}.",
    "{Phrase} is: {v}.",
)
SUBJECT_STATEMENTS = (
    "{Possessive} is {v}.",
    "The {attribute} for {subject} is {v}.",
    "One of the {attribute}s for {subject} is: {v}.",
    "{Subject} has the {attribute} {v}.",
)
ALONE_STATEMENTS = (
    "The {attribute} is {v}. Remember it.",
    "The {attribute} is {v}. Remember it. {v} is the {attribute}.",
    "The {attribute} you must remember is {v}.",
    "Keep this {attribute} in mind: {v}.",
)


def statement(rng: Rng, fact: Fact) -> str:
    """A sentence that tells the fact."""
    pool = STATEMENTS + (SUBJECT_STATEMENTS if fact.subject else ALONE_STATEMENTS)
    return _fill(pick(rng, pool), fact)


# (question, what stands between question and value, what follows the value)
QUESTIONS = (
    ("\nQuestion: What is {phrase}?\nAnswer: ", ""),
    ("\nQuestion: What is {phrase}?\nAnswer: {Phrase} is ", "."),
    ("\nQ: What is {phrase}?\nA: ", ""),
    ("\nQ: {phrase}?\nA: ", ""),
    ("\nWhat is {phrase}? ", ""),
    ("\nWhat is {phrase}? {Phrase} is ", "."),
    ("\nWhat was {phrase}? It was ", "."),
    ("\n{Phrase} is ", "."),
    ("\n{Phrase} is ", "."),
    ("\n{Phrase}: ", ""),
    (" {Phrase} is ", "."),
    ("\nTell me {phrase}. ", ""),
    ("\nWhat is {phrase} mentioned in the text? {Phrase} mentioned in the text is ", "."),
    ("\nAs said above, {phrase} is ", "."),
)
SUBJECT_QUESTIONS = (
    ("\nWhat is {possessive}? ", ""),
    ("\n{Possessive} is ", "."),
    ("\nThe {attribute} for {subject} is ", "."),
    ("\nWhich {attribute} does {subject} have? ", ""),
)


def question(rng: Rng, fact: Fact) -> tuple[str, str]:
    """Text that asks for the fact's value, to stand before it, and the text after the value."""
    pool = QUESTIONS + SUBJECT_QUESTIONS if fact.subject else QUESTIONS
    before, after = pick(rng, pool)
    return _fill(before, fact), after


def _fill(template: str, fact: Fact) -> str:
    return template.format(
        phrase=fact.phrase,
        Phrase=capital(fact.phrase),
        possessive=fact.possessive,
        Possessive=capital(fact.possessive),
        subject=fact.subject,
        Subject=capital(fact.subject),
        attribute=fact.attribute,
        v=fact.value,
    )
