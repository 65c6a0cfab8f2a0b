"""Conversations in the chat template: stories on request, things told and asked again, small talk.

The assistant's words are learned as prose, except what must be recalled, which has an answer's
weight. The user's words and the template's markers have next to none.
"""

from __future__ import annotations

from . import qa
from .corpus import Corpus
from .rows import PROSE_WEIGHT, Row, RowBuilder
from .stories import make_story, plot_words
from .tasks import haystack, hide
from .tokenizer import END_OF_TEXT, IM_END, IM_START
from .wording import (
    ANIMALS,
    COLOURS,
    FOODS,
    NAMES,
    PETS,
    PLACES,
    THINGS,
    WORDS,
    Rng,
    between,
    capital,
    chance,
    digits,
    facts,
    pick,
    statement,
)


class Chat:
    """Adds turns to a row."""

    def __init__(self, row: RowBuilder) -> None:
        self.row = row

    def system(self, text: str) -> None:
        self._open("system").add(text).add(IM_END).add("\n")

    def user(self, text: str) -> None:
        self._open("user").add(text).add(IM_END).add("\n")

    def assistant(self, text: str, recalled: str = "") -> None:
        """The assistant's turn; `recalled` is the part of it that had to be remembered."""
        self._open("assistant")
        before, found, after = text.partition(recalled) if recalled else (text, "", "")
        self.row.add(before, PROSE_WEIGHT)
        if found:
            self.row.answer(found).add(after, PROSE_WEIGHT)
        self.row.add(IM_END, PROSE_WEIGHT).add("\n")

    def _open(self, role: str) -> RowBuilder:
        return self.row.add(IM_START).add(f"{role}\n")


def _new_chat(row: RowBuilder, rng: Rng) -> Chat:
    chat = Chat(row)
    if chance(rng, 0.25):
        chat.system(pick(rng, qa.SYSTEMS))
    return chat


def dialogue(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Conversations one after another until the row is full."""
    row = RowBuilder(size)
    while row.room > 0:
        chat = _new_chat(row, rng)
        kind = rng.random()
        if kind < 0.40:
            _story_chat(chat, rng, corpus)
        elif kind < 0.62:
            _fact_chat(chat, rng, corpus)
        elif kind < 0.82:
            _small_talk(chat, rng)
        else:
            _errands(chat, rng)
        row.add(END_OF_TEXT)
    return row.finish()


def chat_recall(rng: Rng, corpus: Corpus, size: int) -> Row:
    """One conversation as long as the row: a text with hidden facts, and questions about them."""
    row = RowBuilder(size)
    chat = _new_chat(row, rng)
    known = facts(rng, 1 if chance(rng, 0.5) else between(rng, 1, max(1, min(6, size // 150))))
    asked = [known[i] for i in rng.permutation(len(known))[: between(rng, 1, 3)]]
    told = [statement(rng, fact) for fact in known]
    turns = [_recall_turn(rng, fact.phrase, fact.possessive, fact.value) for fact in asked]
    tail = sum(len(q) + len(a) + 30 for q, a in turns)
    spare = size - row.used - tail - sum(len(t) + 1 for t in told) - 60
    body = RowBuilder(max(spare, 2))
    hide(rng, body, haystack(rng, corpus.fiction, max(spare, 2)), told)
    text = body.text()
    (first, reply), *rest = turns
    if chance(rng, 0.6):
        chat.user(f"{text}\n\n{first}" if chance(rng, 0.7) else f"{first}\n\n{text}")
    else:
        chat.user(f"Read this text:\n\n{text}" if chance(rng, 0.5) else text)
        chat.assistant(pick(rng, ("I have read it.", "Okay.", "What would you like to know?")))
        chat.user(first)
    chat.assistant(reply, asked[0].value)
    for fact, (question, reply) in zip(asked[1:], rest, strict=True):
        chat.user(question)
        chat.assistant(reply, fact.value)
    return row.finish()


def _recall_turn(rng: Rng, phrase: str, possessive: str, value: str) -> tuple[str, str]:
    form = rng.random()
    if form < 0.25:
        end = pick(
            rng, ("Answer with the number only.", "Just the number, please.", "Only digits.")
        )
        return f"What is {phrase}? {end}", value
    name = possessive if form > 0.85 and not possessive.startswith("your ") else phrase
    start = pick(rng, ("What is {}?", "What was {}?", "Tell me {}.", "Can you find {}?", "{}?"))
    return capital(start.format(name)), f"{capital(name)} is {value}."


def _story_chat(chat: Chat, rng: Rng, corpus: Corpus) -> None:
    if chance(rng, 0.2):
        _greet(chat, rng)
    for _ in range(1 if chance(rng, 0.8) else 2):
        if chance(rng, 0.45):
            story = make_story(rng)
            text, topics = story.text, list(story.topics)
        else:
            index = int(rng.random() * len(corpus.stories.documents))
            text = bytes(corpus.stories.document(index).astype("uint8")).decode(errors="ignore")
            topics = _topics(rng, text)
        if topics and chance(rng, 0.75):
            topic = pick(rng, topics)
            if len(topics) > 1 and chance(rng, 0.3):
                other = pick(rng, [t for t in topics if t != topic])
                topic = f"{topic} and {other}"
            chat.user(pick(rng, qa.TOPIC_REQUESTS).format(t=topic))
        else:
            chat.user(pick(rng, qa.STORY_REQUESTS))
        chat.assistant(text)
    if chance(rng, 0.3):
        _exchange(chat, pick(rng, qa.THANKS))


def _topics(rng: Rng, text: str) -> list[str]:
    """What a found story may be asked for: the animals, things and names in it."""
    words = plot_words(text)
    found = [w for w in ANIMALS + THINGS if w in words]
    topics = [f"{'an' if w[0] in 'aeiou' else 'a'} {w}" for w in found]
    return topics + [name for name in NAMES if name in text and name.lower() in words]


def _fact_chat(chat: Chat, rng: Rng, corpus: Corpus) -> None:
    """The user tells things about himself, talks of something else, and asks about them."""
    if chance(rng, 0.15):
        _greet(chat, rng)
    kinds = rng.permutation(len(qa.USER_FACTS))[: between(rng, 1, 4)]
    told = [(qa.USER_FACTS[i], _value(rng, qa.USER_FACTS[i][1])) for i in kinds]
    if len(told) > 1 and chance(rng, 0.3):  # all in one turn
        chat.user(" ".join(pick(rng, f[0]).format_map(_slots(v)) for f, v in told))
        chat.assistant(pick(rng, ("Thank you for telling me.", "I will remember all of that.")))
    else:
        for fact, value in told:
            chat.user(pick(rng, fact[0]).format_map(_slots(value)))
            reply = pick(rng, fact[2])
            chat.assistant(reply.format_map(_slots(value)), value if "{v}" in reply else "")
    if chance(rng, 0.3):
        chat.user(pick(rng, qa.STORY_REQUESTS))
        chat.assistant(make_story(rng).text)
    elif chance(rng, 0.5):
        _exchange(chat, pick(rng, qa.GENERAL))
    for i in rng.permutation(len(told)):
        fact, value = told[i]
        chat.user(pick(rng, fact[3]))
        chat.assistant(fact[4].format_map(_slots(value)), value)


def _value(rng: Rng, kind: str) -> str:
    pools = {"name": NAMES, "colour": COLOURS, "animal": ANIMALS, "pet": PETS, "food": FOODS}
    if kind == "digits":
        return digits(rng)
    if kind == "age":
        return str(between(rng, 5, 90))
    return pick(rng, PLACES if kind == "place" else pools[kind])


def _slots(value: str) -> dict[str, str]:
    article = "an" if value[0].lower() in "aeiou" else "a"
    return {"v": value, "V": capital(value), "a": f"{article} {value}"}


def _small_talk(chat: Chat, rng: Rng) -> None:
    if chance(rng, 0.5):
        _greet(chat, rng)
    for _ in range(between(rng, 1, 4)):
        _exchange(chat, pick(rng, qa.GENERAL if chance(rng, 0.7) else qa.ABOUT))
    if chance(rng, 0.4):
        _exchange(chat, pick(rng, qa.THANKS))


def _errands(chat: Chat, rng: Rng) -> None:
    """Small tasks on what the user just said: repeat, spell, count, add, say what came last."""
    for _ in range(between(rng, 1, 3)):
        kind = int(rng.random() * 5)
        words = [pick(rng, WORDS) for _ in range(between(rng, 2, 7))]
        if kind == 0:
            text = " ".join(words)
            chat.user(pick(rng, ("Repeat after me: {}", "Say this: {}", "Copy: {}")).format(text))
            chat.assistant(text, text)
        elif kind == 1:
            chat.user(f"How many words are in this list: {', '.join(words)}?")
            chat.assistant(f"There are {len(words)} words.", str(len(words)))
        elif kind == 2:
            place = pick(rng, ("first", "last"))
            word = words[0 if place == "first" else -1]
            chat.user(f"What is the {place} word of this list: {', '.join(words)}?")
            chat.assistant(f"The {place} word is {word}.", word)
        elif kind == 3:
            a, b = between(rng, 0, 9), between(rng, 0, 9)
            chat.user(pick(rng, ("What is {} + {}?", "What is {} plus {}?")).format(a, b))
            chat.assistant(f"{a} + {b} = {a + b}.", str(a + b) if a + b > 9 else "")
        else:
            thing, colours = pick(rng, THINGS), [pick(rng, COLOURS) for _ in range(3)]
            story = " ".join(f"I painted the {thing} {colour}." for colour in colours)
            chat.user(f"{story} What colour is the {thing} now?")
            chat.assistant(f"The {thing} is {colours[-1]}.", colours[-1])


def _greet(chat: Chat, rng: Rng) -> None:
    _exchange(chat, pick(rng, qa.GREETINGS))


def _exchange(chat: Chat, pair: tuple[str, str]) -> None:
    chat.user(pair[0])
    chat.assistant(pair[1])
