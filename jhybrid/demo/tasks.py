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
    NAMES,
    PLACES,
    THINGS,
    WORDS,
    Fact,
    Rng,
    between,
    capital,
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


def _letters(rng: Rng) -> str:
    return "".join(chr(97 + int(x * 26)) for x in rng.random(between(rng, 2, 6)))


def _pair_of_words(rng: Rng) -> str:
    return f"{pick(rng, ADJECTIVES)} {pick(rng, ANIMALS + THINGS)}"


_KEYS = (_any_word, _letters, digits, _pair_of_words)
_VALUES = (digits, digits, _any_word, _letters)


def haystack(rng: Rng, text: Text, size: int) -> np.ndarray:
    """Running text to hide things in: prose, or sometimes a few sentences said over and over."""
    if chance(rng, 0.12):
        part = text.window(rng, between(rng, 30, 160))
        return np.resize(np.append(part, encode(pick(rng, (" ", ". ", "\n")))), size)
    part = text.window(rng, size)
    return np.where(part == END_OF_TEXT, NEWLINE, part)


def gaps(rng: Rng, hay: np.ndarray, count: int) -> np.ndarray:
    """`count` sorted places in `hay`, spread evenly at random, moved to ends of sentences."""
    ends = np.flatnonzero(np.isin(hay[:-1], encode(".!?")) & (hay[1:] == ord(" "))) + 1
    spots = np.floor(rng.random(count) * (len(hay) + 1)).astype(np.int64)
    if len(ends):
        spots = ends[np.minimum(np.searchsorted(ends, spots), len(ends) - 1)]
    return np.sort(spots)


def hide(rng: Rng, row: RowBuilder, hay: np.ndarray, sentences: list[str]) -> None:
    """Add `hay` with each sentence at a random place in it, in their order."""
    start = 0
    for stop, sentence in zip(gaps(rng, hay, len(sentences)), sentences, strict=True):
        row.add(hay[start:stop]).add(f" {sentence}")
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


def last_write(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Things that change: only the last value told counts."""
    row = RowBuilder(size)
    write, ask = pick(rng, _WRITES)
    holders = [f"the {pick(rng, ADJECTIVES)} {pick(rng, THINGS)}" for _ in range(4)]
    holders = list(dict.fromkeys(holders))[: between(rng, 1, 4 if size >= 512 else 2)]
    in_prose = size >= 512 and chance(rng, 0.5)
    numbers = chance(rng, 0.7)
    now: dict[str, str] = {}
    told: list[str] = []
    tail = 64 * len(holders)
    budget = size - tail - (between(rng, size // 4, size // 2) if in_prose else 0)
    while sum(map(len, told)) + len(told) < budget and len(told) < 60:
        holder = pick(rng, holders)
        value = digits(rng, between(rng, 2, 5)) if numbers else f"the {pick(rng, ANIMALS)}"
        now[holder] = value
        told.append(write.format(Holder=capital(holder), holder=holder, value=value))
    if in_prose:
        spare = size - tail - sum(len(t) + 1 for t in told)
        hide(rng, row, haystack(rng, corpus.fiction, max(spare, 2)), told)
    else:
        row.add(pick(rng, (" ", "\n")).join(told))
    for i in rng.permutation(len(now)):
        holder = list(now)[i]
        row.add(ask.format(Holder=capital(holder), holder=holder)).answer(now[holder]).add(".")
    return row.finish()


_WRITES = (
    ("{Holder} now holds {value}.", "\nAt the end {holder} holds "),
    ("{Holder} holds {value}.", "\nWhat does {holder} hold now? {Holder} holds "),
    ("Then {holder} got {value}.", "\nWhat did {holder} get last? "),
    ("Set {holder} to {value}.", "\nThe value of {holder} is "),
    ("Someone put {value} in {holder}.", "\nWhat was put in {holder} last? "),
)


def tracking(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Chains of names: a gets a number, b the value of a, and so on; what is c?"""
    row = RowBuilder(size)
    while row.room > 200:
        start, link, ask = pick(rng, _LINKS)
        names = [_letters(rng).upper() + pick(rng, ("", "", "1", "2")) for _ in range(40)]
        names = list(dict.fromkeys(names))
        chains: list[list[str]] = []
        roots: dict[str, str] = {}
        hops = between(rng, 1, 4)
        for _ in range(between(rng, 1, max(1, min(5, row.room // 150)))):
            value, before, chain = digits(rng), "", []
            for hop in range(hops + 1):
                name = names.pop()
                roots[name] = value
                line = link if hop else start
                chain.append(line.format(name=name, before=before, value=value))
                before = name
            chains.append(chain)
        told = _interleave(rng, chains)
        asked = [list(roots)[i] for i in rng.permutation(len(roots))[: between(rng, 1, 4)]]
        tail = sum(len(ask.format(name=name)) + len(roots[name]) + 1 for name in asked)
        spare = row.room - tail - sum(len(t) + 1 for t in told)
        if spare > 100 and chance(rng, 0.5):
            hide(rng, row, haystack(rng, corpus.fiction, between(rng, 40, spare)), told)
        else:
            row.add("\n".join(told))
        for name in asked:
            row.add(ask.format(name=name)).answer(roots[name]).add(".")
        row.add("\n\n")
    return row.finish()


_LINKS = (
    ("Let {name} be {value}.", "Let {name} be {before}.", "\nThe value of {name} is "),
    ("{name} = {value}.", "{name} = {before}.", "\n{name} = "),
    ("Set {name} to {value}.", "Set {name} to {before}.", "\nWhat is {name}? "),
    ("{name} is {value}.", "{name} is the same as {before}.", "\n{name} is "),
)


def _interleave(rng: Rng, lists: list[list[str]]) -> list[str]:
    """All items, each list in its own order, the lists mixed at random."""
    queues = [list(reversed(items)) for items in lists]
    mixed = []
    while queues:
        queue = queues[int(rng.random() * len(queues))]
        mixed.append(queue.pop())
        queues = [q for q in queues if q]
    return mixed


def counting(rng: Rng, corpus: Corpus, size: int) -> Row:
    """A list of words: how often does one of them occur, and which occurs most?"""
    row = RowBuilder(size)
    while row.room > 150:
        pool = list({pick(rng, WORDS) for _ in range(between(rng, 2, 6))})
        counts = {word: between(rng, 1, 6) for word in pool}
        # no tie for the first place, so that "most often" has one answer
        top = pick(rng, pool)
        counts[top] = max(counts.values()) + 1
        words = [word for word, count in counts.items() for _ in range(count)]
        words = [words[i] for i in rng.permutation(len(words))]
        while sum(map(len, words)) + 2 * len(words) > row.room - 110:
            words.pop()
        row.add(f"Words: {', '.join(words)}.")
        for word in [pool[i] for i in rng.permutation(len(pool))[: between(rng, 1, 3)]]:
            row.add(f"\nHow often is {word} in the list? ").answer(str(words.count(word)))
        tally = {word: words.count(word) for word in pool}
        best = [word for word in pool if tally[word] == max(tally.values())]
        if len(best) == 1:
            row.add("\nThe most common word is ").answer(best[0]).add(".")
        row.add("\n\n")
    return row.finish()


def registers(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Last write wins without words around it: `x=5 y=7 x=9 x? 9`, asked all along the row."""
    row = RowBuilder(size)
    names = list(dict.fromkeys(pick(rng, NAMES + PLACES) for _ in range(between(rng, 2, 8))))
    now: dict[str, str] = {}
    stop = pick(rng, ("\n", "; ", " "))
    while row.room > 0:
        name = pick(rng, names)
        if name in now and chance(rng, 0.5):
            row.add(f"{name}? ").answer(now[name]).add(stop)
        else:
            now[name] = digits(rng, between(rng, 1, 5))
            row.add(f"{name}={now[name]}{stop}")
    return row.finish()
