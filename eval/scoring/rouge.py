"""ROUGE-L as LongBench scores it: the PyPI package `rouge` 1.0.1, not Google's `rouge-score`.

Sentences end at full stops, words count once (sets), nothing is lower-cased or stemmed. For each
reference sentence the union, over candidate sentences, of the words on a longest common
subsequence is taken; recall and precision divide the words so found by the numbers of distinct
words.
"""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """The best F over the references; 0 for a prediction without words."""
    return max(_summary_f(prediction, reference) for reference in references)


def _summary_f(prediction: str, reference: str) -> float:
    candidate, gold = _sentences(prediction), _sentences(reference)
    if not candidate or not gold:
        return 0.0
    found: set[str] = set()
    for sentence in gold:
        for other in candidate:
            found.update(_common(sentence, other))
    recall = len(found) / len({word for s in gold for word in s})
    precision = len(found) / len({word for s in candidate for word in s})
    return 2 * recall * precision / (recall + precision + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence. A piece of blanks only is one empty word, as in the package."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common(a: list[str], b: list[str]) -> list[str]:
    """The words of one longest common subsequence."""
    rows, columns = len(a), len(b)
    table = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            if a[i - 1] == b[j - 1]:
                table[i][j] = table[i - 1][j - 1] + 1
            else:
                table[i][j] = max(table[i - 1][j], table[i][j - 1])
    words, i, j = [], rows, columns
    while i and j:
        if a[i - 1] == b[j - 1]:
            words.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
