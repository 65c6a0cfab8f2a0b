"""Stop strings: the same result however the text is cut, nothing leaked, nothing held too long."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from jhybrid.engine.stop import StopMatcher


def truncate(text, stops):
    """The definition: the stop complete first, of those the longest; text before it."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def stream(pieces, stops):
    """(pieces emitted, stop); checks after every piece that exactly the needed text is held."""
    matcher, emitted, seen = StopMatcher(stops), [], ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        emitted.append(text)
        if stop is not None:
            return emitted, stop
        seen += piece
        starts = range(max(0, len(seen) - max(map(len, stops)) + 1), len(seen) + 1)
        held = next(seen[i:] for i in starts if any(s.startswith(seen[i:]) for s in stops))
        assert "".join(emitted) + held == seen
    return [*emitted, matcher.finish()], None


def cuts(text):
    """All ways to cut a text into pieces."""
    for count in range(len(text)):
        for borders in combinations(range(1, len(text)), count):
            edges = [0, *borders, len(text)]
            yield [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def test_exhaustive_small_alphabet():
    stop_sets = [["ab", "abc"], ["aab"], ["ab", "ba"], ["abca", "bc"], ["cab", "ab", "b"], ["aa"]]
    for stops in stop_sets:
        for text in map("".join, product("abc", repeat=6)):
            expected = truncate(text, stops)
            for pieces in ([text], list(text), [text[:2], text[2:]], [text[:3], "", text[3:]]):
                emitted, stop = stream(pieces, stops)
                assert ("".join(emitted), stop) == expected, (stops, pieces)


def test_every_cut_of_one_text():
    for pieces in cuts("xabcabdabcdz"):
        emitted, stop = stream(pieces, ["abcd", "bcda"])
        assert ("".join(emitted), stop) == ("xabcabd", "abcd")


@given(
    st.lists(st.text("ab日🦄", min_size=1, max_size=5), min_size=1, max_size=5),
    st.lists(st.text("ab日🦄", max_size=4), max_size=12),
)
def test_streamed_is_truncated(stops, pieces):
    emitted, stop = stream(pieces, stops)
    assert ("".join(emitted), stop) == truncate("".join(pieces), stops)


def test_text_that_begins_no_stop_is_never_held():
    matcher = StopMatcher(["stop!", "\n\nUser:"])
    assert matcher.push("plain text") == ("plain text", None)
    assert matcher.push(" sto") == (" ", None)
    assert matcher.push("ne\n") == ("stone", None)
    assert matcher.finish() == "\n"


def test_unarmed_matches_are_passed_over():
    matcher = StopMatcher(["ab", "abc"])
    assert matcher.push("xab", armed=False) == ("x", None)  # "abc" may still come
    assert matcher.push("d", armed=False) == ("abd", None)
    assert matcher.push("abc", armed=False) == ("abc", None)  # complete: nothing to wait for
    assert matcher.push("aab") == ("a", "ab")


def test_a_stop_may_begin_before_it_may_match():
    matcher = StopMatcher(["abc"])
    assert matcher.push("ab", armed=False) == ("", None)
    assert matcher.push("c") == ("", "abc")
