"""Generated rows: prose, and skills that need memory (each checks itself in tests).

Every task is a function (rng, corpus, size) -> Row of `size` tokens. Rows are cheap to make (under
100 microseconds per 256 bytes), so that a few processes feed an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .corpus import Corpus, Text
from .rows import PROSE_WEIGHT, Row, RowBuilder
from .stories import make_story
from .tokenizer import END_OF_TEXT, encode
from .wording import (
    ADJECTIVES,
    ANIMALS,
    THINGS,
    WORDS,
    Fact,
    Rng,
    between,
    chance,
    digits,
    facts,
    pick,
    question,
    statement,
)

Task = Callable[[Rng, Corpus, int], Row]
NEWLINE = np.uint16(ord("\n"))
COPY_WEIGHT = 1.0  # copies are long: at the weight of an answer they would drown the rest


def fiction(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Books, from the start of a random sentence."""
    return RowBuilder(size).add(corpus.fiction.window(rng, size), PROSE_WEIGHT).finish()


def stories(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Short stories one after another, a third of them generated; half the rows begin mid-story."""
    row = RowBuilder(size)
    if chance(rng, 0.5):
        story = _story(rng, corpus)
        row.add(story[int(rng.random() * len(story)) :], PROSE_WEIGHT).add(END_OF_TEXT, 1.0)
    while row.room > 0:
        row.add(_story(rng, corpus), PROSE_WEIGHT).add(END_OF_TEXT, PROSE_WEIGHT)
    return row.finish()


def _story(rng: Rng, corpus: Corpus) -> np.ndarray:
    if chance(rng, 1 / 3):
        return encode(make_story(rng).text)
    return corpus.stories.document(int(rng.random() * len(corpus.stories.documents)))


def induction(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Lines `key=value`, then the same keys again in another order: the seed of all recall."""
    row = RowBuilder(size)
    equals, stop = pick(rng, ("=", "=", ": ", " -> ", " is ")), pick(rng, ("\n", "\n", "; ", ", "))
    make_key, make_value = pick(rng, _KEYS), pick(rng, _VALUES)
    pairs: dict[str, str] = {}
    spent, limit = 0, size * (0.3 + 0.25 * rng.random())
    while spent < limit:
        key, value = make_key(rng), make_value(rng)
        if key not in pairs:
            pairs[key] = value
            spent += len(key) + len(equals) + len(value) + len(stop)
    for key, value in pairs.items():
        row.add(f"{key}{equals}{value}{stop}")
    keys = list(pairs)
    while row.room > 0:
        for i in rng.permutation(len(keys)):
            row.add(f"{keys[i]}{equals}").answer(pairs[keys[i]]).add(stop)
    return row.finish()


def _any_word(rng: Rng) -> str:
    return pick(rng, WORDS)


def _letter(rng: Rng) -> str:
    return chr(97 + int(rng.random() * 26))


def _letters(rng: Rng) -> str:
    return "".join(chr(97 + int(x * 26)) for x in rng.random(between(rng, 2, 6)))


def _pair_of_words(rng: Rng) -> str:
    return f"{pick(rng, ADJECTIVES)} {pick(rng, ANIMALS + THINGS)}"


_KEYS = (_any_word, _letters, digits, _pair_of_words)
_VALUES = (digits, digits, _any_word, _letters)


def registers(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Lines `key=value`, the same keys over and over, then each key with what it held last.

    The shortest form of "last write wins": a recurrent state learns it first from such rows.
    """
    row = RowBuilder(size)
    equals, stop = pick(rng, ("=", "=", ": ", " now holds ")), pick(rng, ("\n", "; ", ".\n"))
    make_key = pick(rng, (_letter, _letter, _any_word, _pair_of_words))
    width = 1 if chance(rng, 0.5) else between(rng, 2, 5)
    keys = list(dict.fromkeys(make_key(rng) for _ in range(between(rng, 2, 8))))
    line = max(map(len, keys)) + len(equals) + width + len(stop)
    now: dict[str, str] = {}
    while row.room > line * (len(now) + 2):
        key = pick(rng, keys)
        now[key] = digits(rng, width)
        row.add(f"{key}{equals}{now[key]}{stop}")
    row.boundary = row.used
    for i in rng.permutation(len(keys)):
        if keys[i] in now:
            row.add(f"{keys[i]}{equals}").answer(now[keys[i]], decisive=0).add(stop)
    return row.finish(balanced=True)


def haystack(rng: Rng, text: Text, size: int) -> np.ndarray:
    """Running text to hide things in: prose, or sometimes a few sentences said over and over."""
    if chance(rng, 0.12):
        part = text.window(rng, between(rng, 30, 160))
        return np.resize(np.append(part, encode(pick(rng, (" ", ". ", "\n")))), size)
    part = text.window(rng, size)
    return np.where(part == END_OF_TEXT, NEWLINE, part)


def gaps(rng: Rng, hay: np.ndarray, count: int) -> np.ndarray:
    """`count` sorted places in `hay`, evenly at random: ends of sentences, and start and end."""
    ends = np.flatnonzero(np.isin(hay[:-1], encode(".!?")) & (hay[1:] == ord(" "))) + 1
    places = np.concatenate([[0], ends, [len(hay)]])
    spots = np.floor(rng.random(count) * (len(hay) + 1)).astype(np.int64)
    after = np.searchsorted(places, spots)
    nearer = spots - places[np.maximum(after - 1, 0)] < places[after] - spots
    return np.sort(places[np.where(nearer, after - 1, after)])


def hide(rng: Rng, row: RowBuilder, hay: np.ndarray, sentences: list[str]) -> None:
    """Add `hay` with each sentence at a random place in it, in their order."""
    start, before = 0, "\n" if chance(rng, 0.15) else " "
    for stop, sentence in zip(gaps(rng, hay, len(sentences)), sentences, strict=True):
        row.add(hay[start:stop]).add(f"{before}{sentence}")
        start = int(stop)
    row.add(hay[start:])


def recall(rng: Rng, corpus: Corpus, size: int) -> Row:
    """One to eight facts hidden in prose, some of them asked for at the end."""
    most = max(1, min(8, size // 110))
    known = facts(rng, 1 if chance(rng, 0.3) else between(rng, 1, most))
    asked = rng.permutation(len(known))[: between(rng, 1, 4)]
    return recall_row(rng, corpus.fiction, size, known, [known[i] for i in asked])


def recall_row(rng: Rng, text: Text, size: int, known: list[Fact], asked: list[Fact]) -> Row:
    """Prose of `text` with the `known` facts in it, then a question for each of those `asked`."""
    told = [statement(rng, fact) for fact in known]
    tail = [(question(rng, fact), fact.value) for fact in asked]
    row = RowBuilder(size)
    spare = size - sum(len(t) + 1 for t in told)
    while len(tail) > 1 and spare - _length(tail) < size // 8:
        tail.pop()
    hide(rng, row, haystack(rng, text, max(spare - _length(tail), 2)), told)
    row.boundary = row.used
    for (before, after), value in tail:
        row.add(before).answer(value).add(after)
    return row.finish()


def _length(tail: list[tuple[tuple[str, str], str]]) -> int:
    return sum(len(before) + len(after) + len(value) for (before, after), value in tail)


def copying(rng: Rng, corpus: Corpus, size: int) -> Row:
    """A passage, and the same passage again, sometimes with other text between."""
    row = RowBuilder(size)
    while row.room > 24:
        length = between(rng, 8, max(9, min(300, row.room // 2 - 12)))
        kind = rng.random()
        if kind < 0.35:
            passage = corpus.fiction.window(rng, length)
            passage = np.where(passage == END_OF_TEXT, NEWLINE, passage)
        elif kind < 0.7:
            passage = encode(" ".join(pick(rng, WORDS) for _ in range(length // 6 + 1))[:length])
        else:
            passage = encode("".join(str(int(x * 10)) for x in rng.random(length)))
        start, again = pick(rng, _COPY_FRAMES)
        row.add(start).add(passage)
        if chance(rng, 0.3) and row.room > 2 * length + 100:
            hay = haystack(rng, corpus.fiction, between(rng, 20, row.room - length - 40))
            row.add("\n").add(hay)
        row.add(again).answer(passage, COPY_WEIGHT).add("\n\n")
    return row.finish()


_COPY_FRAMES = (
    ("Copy this: ", "\nCopy: "),
    ("Text: ", "\nThe same text again: "),
    ('Repeat after me: "', '"\n"'),
    ("", "\n"),
    ("Original:\n", "\n\nCopy:\n"),
)
