"""Rows in the form of the evaluation's retrieval, tracking, counting and order tasks.

Same wording files and word lists as `eval` (set `plain`), other random draws, and books in place of
essays as a haystack. A context has as many questions as it allows: each is a signal.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..eval.tasks.niah import listed
from ..eval.tasks.wording import Template, Wording
from ..eval.tasks.words import Words, load_words
from .corpus import Corpus
from .rows import Row, RowBuilder
from .tasks import gaps
from .wording import Rng, between, capital, chance, digits, pick

Block = Callable[[Rng, Corpus, RowBuilder, int], None]
SPACE = ord(" ")
ZETA_2 = np.pi**2 / 6
NOUNS = {"numbers": "number", "words": "word", "uuids": "uuid"}


@cache
def _template(task: str) -> Template:
    return Wording("plain").task(task)


@cache
def _words() -> Words:
    return load_words()


def _row(rng: Rng, corpus: Corpus, size: int, block: Block, alone: float = 0.6) -> Row:
    """One block that fills the row, whose context ends at a boundary; or several shorter ones."""
    row = RowBuilder(size)
    if size < 600 or chance(rng, alone):
        block(rng, corpus, row, size)
    else:
        while row.room > 250:
            block(rng, corpus, row, min(row.room, between(rng, 250, max(300, size // 2))))
        row.boundary = None
    return row.finish(balanced=True)


def needles(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Keyed values in repeated noise, in prose or among others of their kind."""
    return _row(rng, corpus, size, _needles)


def _needles(rng: Rng, corpus: Corpus, row: RowBuilder, size: int) -> None:
    form = _template("niah")
    types = pick(rng, ("numbers",) * 12 + ("uuids", "words"))
    where = rng.random()
    if where < 0.15:  # among others of their kind
        key_kind = "uuids" if types == "uuids" else "words"
        count = max(2, (size - 400) // (90 if key_kind == "words" else 125))
    else:
        key_kind, most = "words", max(1, min(8, (size - 150) // 110))
        count = min(most, pick(rng, (1, 1, 1, 4, 4, 4, between(rng, 2, 8))))
    several = 4 if count == 1 and size > 500 and chance(rng, 0.15) else 1
    pairs = {
        _value(rng, key_kind): [_value(rng, types) for _ in range(several)] for _ in range(count)
    }
    keys = [list(pairs)[i] for i in rng.permutation(len(pairs))]
    told = [
        form.text("needle", types=types, type=NOUNS[types], key=key, value=value)
        for key in keys
        for value in pairs[key]
    ]
    told = [told[i] for i in rng.permutation(len(told))]
    asked = [keys[i] for i in rng.permutation(len(keys))[: min(4, max(1, size // 220))]]
    together = several > 1 or (len(asked) > 1 and chance(rng, 0.12))
    named = {"type": NOUNS[types], "types": types}
    part = form.raw("many" if together else "one")
    groups = [asked] if together else [[key] for key in asked]
    questions = []
    for group in groups:
        answer = " " + listed([value for key in group for value in pairs[key]])
        keyed = named | {"keys": listed(group)}
        questions.append(
            (part["question"].format(**keyed) + part["prefix"].format(**keyed), answer)
        )
    instruction = part["instruction"].format(**named)
    room = (
        size - len(instruction) - 2 - _length(told) - sum(len(q) + len(a) + 2 for q, a in questions)
    )
    row.add(f"{instruction}\n")
    if where < 0.15:
        row.add("\n".join(told))
    elif where < 0.5:
        row.add("\n".join(_in_lines(rng, _noise(form, room), told)))
    else:
        row.add(_in_prose(rng, corpus, max(room, 2), told))
    row.add("\n")
    row.boundary = row.used
    for question, answer in questions:
        row.add(question).answer(answer).add(".\n")


def _value(rng: Rng, kind: str) -> str:
    match kind:
        case "numbers":
            return digits(rng, 7)
        case "uuids":
            return str(uuid.UUID(bytes=rng.bytes(16), version=4))
        case _:
            words = _words()
            return f"{pick(rng, words.adjectives)}-{pick(rng, words.nouns)}"


def writes(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Things get new values over and over; the last one counts."""
    return _row(rng, corpus, size, _writes, alone=1.0)


def _writes(rng: Rng, corpus: Corpus, row: RowBuilder, size: int) -> None:
    form = _template("order")
    part = form.raw("last_write")
    count, quiet = (4, 0.25) if size > 600 else (between(rng, 2, 3), 0)  # noise for a statement
    holders = [f"the {_value(rng, 'words').replace('-', ' ')}" for _ in range(count)]
    named = [{"holder": holder, "Holder": capital(holder)} for holder in dict.fromkeys(holders)]
    ask = [part["question"].format(**n) + part["prefix"].format(**n) for n in named]
    most = len(named) if size > 600 else 1  # questions: in a short row they leave no room to write
    room = size - len(part["instruction"]) - 2 - most * (max(map(len, ask)) + 8)
    each = sum(len(form.text("write", value="12345", **n)) + 1 for n in named) / len(named)
    units = max(1, int(room / (each + (len(form.raw("noise")) + 1) * quiet)))
    now: dict[int, str] = {}
    told = []
    for _ in range(units):
        holder = between(rng, 0, len(named) - 1)
        now[holder] = digits(rng, 5)
        told.append(form.text("write", value=now[holder], **named[holder]))
    lines = _in_lines(rng, [form.raw("noise")] * int(units * quiet), told)
    row.add(f"{part['instruction']}\n" + "\n".join(lines) + "\n")
    row.boundary = row.used
    for holder in rng.permutation(list(now))[:most]:
        row.add(ask[holder]).answer(f" {now[holder]}.", decisive=1).add("\n")


def variables(rng: Rng, corpus: Corpus, size: int) -> Row:
    """A chain of assignments in noise; which variables hold the value?"""
    return _row(rng, corpus, size, _variables)


def _variables(rng: Rng, corpus: Corpus, row: RowBuilder, size: int) -> None:
    hops = 4 if size > 400 else between(rng, 1, 3)
    if size > 900 and chance(rng, 0.6 if size > 1900 else 0.2):
        before = row.used
        _chain(rng, row, 500, hops, 3)
        size -= row.used - before
    _chain(rng, row, size, hops, 5)


def _chain(rng: Rng, row: RowBuilder, size: int, hops: int, letters: int) -> None:
    form, value = _template("vt"), digits(rng, 5)
    names: dict[str, None] = {}
    while len(names) <= hops:
        names["".join(pick(rng, string.ascii_uppercase) for _ in range(letters))] = None
    told, before = [], ""
    for name in names:
        told.append(form.text("link" if before else "first", name=name, before=before, value=value))
        before = name
    known: dict[str, Any] = {"value": value, "count": hops + 1}
    ask, answer = form.text("question", **known) + form.text("prefix", **known), " ".join(names)
    room = size - len(form.raw("instruction")) - _length(told) - len(ask) - len(answer) - 5
    lines = _in_lines(rng, _noise(form, room), told)
    row.add(f"{form.raw('instruction')}\n\n" + "\n".join(lines) + "\n")
    row.boundary = row.used
    row.add(ask).answer(answer).add("\n\n")


def common_words(rng: Rng, corpus: Corpus, size: int) -> Row:
    """A numbered list in which some words stand more often than the others.

    The answer has them in the order in which they are first said again.
    """
    return _row(rng, corpus, size, _common_words)


def _common_words(rng: Rng, corpus: Corpus, row: RowBuilder, size: int) -> None:
    if size > 1900 and chance(rng, 0.6):  # a solved example
        before = row.used
        _numbered(rng, row, 10, 3, 800)
        size -= row.used - before
    often = pick(rng, (3, 4, 6, 6)) if size > 700 else pick(rng, (2, 3, 4))
    common = min(10, max(2, (size - 150) // (10 * often + 15)))
    _numbered(rng, row, common, often, size)


def _numbered(rng: Rng, row: RowBuilder, common: int, often: int, size: int) -> None:
    form, pool = _template("cwe"), _words().pool
    chosen = rng.choice(len(pool), common + size // 9, replace=False)
    widths = np.array([len(pool[i]) for i in chosen.tolist()])
    room = size - 130 - int(widths[:common].sum() * (often + 1)) - 6 * common
    number = np.arange(1, common * often + len(chosen) - common + 1)
    numbers = np.cumsum(4 + (number >= 10) + (number >= 100) + (number >= 1000))  # "12. " and so on
    spent = numbers[common * often :] + np.cumsum(widths[common:])
    chosen = chosen[: common + int(np.searchsorted(spent, room))]
    many = rng.permutation(np.concatenate([np.repeat(chosen[:common], often), chosen[common:]]))
    seen: set[int] = set()
    again: dict[int, None] = {}
    for word in many.tolist():
        if word in seen:
            again[word] = None
        seen.add(word)
    row.add(f"{form.raw('instruction')}\n")
    row.add(" ".join(f"{i}. {pool[word]}" for i, word in enumerate(many.tolist(), 1)) + "\n")
    row.boundary = row.used
    row.add(form.text("question", count=common) + form.text("prefix", count=common))
    row.answer("".join(f" {i}. {pool[word]}" for i, word in enumerate(again, 1))).add("\n\n")


def frequent_words(rng: Rng, corpus: Corpus, size: int) -> Row:
    """Made-up words by a zeta law; which three stand most often, apart from the dots?"""
    return _row(rng, corpus, size, _frequent_words)


def _frequent_words(rng: Rng, corpus: Corpus, row: RowBuilder, size: int) -> None:
    form = _template("fwe")
    texts = [form.raw(part) for part in ("instruction", "question", "prefix")]
    room = size - sum(map(len, texts)) - 30
    counts = _zeta_counts(room, max((size - 50) // 50, 5)) if size > 700 else _few_counts(room)
    kinds = len(counts)
    letters = rng.integers(97, 123, (kinds, 6), np.uint8)
    words = ["...", *(bytes(word).decode() for word in letters[1:])]
    text = rng.permutation(np.repeat(np.arange(kinds), counts))
    row.add(f"{texts[0]}\n" + " ".join([words[i] for i in text.tolist()]) + "\n")
    row.boundary = row.used
    row.add(texts[1] + texts[2]).answer(" " + " ".join(words[1:4])).add("\n\n")


def _zeta_counts(room: int, kinds: int) -> np.ndarray:
    """How often the dots and each word of six letters stand in `room` bytes."""
    ranks = np.arange(1, kinds + 1, dtype=np.float64)
    units = room / 5.3  # bytes of a word and its blank, by the law; fewer, as counts are floored
    fitting = (units * ranks**-2 / ZETA_2).astype(np.int64)
    while True:
        counts = (units * ranks**-2 / ZETA_2).astype(np.int64)
        left = room - 4 * counts[0] - 7 * counts[1:].sum()
        if left < 0:
            return fitting
        fitting, units = counts, units + max(1, left / 8)


def _few_counts(room: int) -> np.ndarray:
    """The same where the law would leave a word out: 3, 4, 3, 2, and then ones, or a multiple."""
    times = max(1, room // 150)
    left = room - times * (3 * 4 + 9 * 7)
    return times * np.array([3, 4, 3, 2, *[1] * max(0, left // (7 * times))], np.int64)


def _noise(form: Template, room: int) -> list[str]:
    noise = form.raw("noise")
    return [noise] * max(0, room // (len(noise) + 1))


def _length(lines: list[str]) -> int:
    return sum(map(len, lines)) + len(lines)


def _in_lines(rng: Rng, units: list[str], told: list[str]) -> list[str]:
    """In their order before distinct units drawn at random."""
    count = max(len(units), len(told))
    places = np.sort(rng.choice(count, len(told), replace=False)).tolist()
    lines: list[str] = []
    last = 0
    for place, sentence in zip(places, told, strict=True):
        lines += [*units[last:place], sentence]
        last = place
    return [*lines, *units[last:]]


def _in_prose(rng: Rng, corpus: Corpus, room: int, told: list[str]) -> np.ndarray:
    """Between sentences of a book that is one long line."""
    text = corpus.fiction.window(rng, room + room // 8 + 64)
    text = np.where((text == ord("\n")) | (text > 255), SPACE, text)
    text = text[np.append(True, (text[1:] != SPACE) | (text[:-1] != SPACE))][:room]
    pieces: list[bytes] = []
    last = 0
    for place, sentence in zip(gaps(rng, text, len(told)).tolist(), told, strict=True):
        pieces += [text[last:place].astype(np.uint8).tobytes().strip(), sentence.encode()]
        last = place
    pieces.append(text[last:].astype(np.uint8).tobytes().strip())
    return np.frombuffer(b" ".join(filter(None, pieces)), np.uint8).astype(np.uint16)
