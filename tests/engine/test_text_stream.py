"""Detokeniser and stop strings together, as the engine's commit uses them."""

import pytest

from jhybrid.engine.detokenizer import TokenBytes
from jhybrid.engine.request import SamplingParams
from jhybrid.engine.text_stream import TextStream
from tests.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = TokenBytes(TOKENIZER)


def run(text, *, cut=None, **params):
    stream = TextStream(VOCAB, SamplingParams(**params), ())
    pieces, used = [], 0
    for token in TOKENIZER.encode(text)[:cut]:
        delta = stream.push(token)
        pieces.append(delta.text)
        used += 1
        if delta.stop is not None:
            return "".join(pieces), delta.stop, used
    delta = stream.finish()
    return "".join(pieces) + delta.text, delta.stop, used


def test_stop_inside_and_across_characters():
    assert run("x日本y", stop="本") == ("x日", "本", 7)
    assert run("x日本y", stop=["日本語"]) == ("x日本y", None, 8)
    assert run("<think>a", stop="nk>a") == ("<thi", "nk>a", 2)


def test_min_tokens_arms_stop_strings():
    assert run("ababab", stop="ab", max_tokens=9) == ("", "ab", 2)
    assert run("ababab", stop="ab", min_tokens=3, max_tokens=9) == ("ab", "ab", 4)
    assert run("ababab", stop="ab", min_tokens=7, max_tokens=9) == ("ababab", None, 6)


def test_leftover_goes_through_the_matcher():
    assert run("a日", cut=3, stop="\ufffd") == ("a", "\ufffd", 3)
    assert run("a日", cut=3) == ("a\ufffd", None, 3)
    assert run("ab", stop="abc") == ("ab", None, 2)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip):
    text, stop, _ = run("a<|im_start|>b", skip_special_tokens=skip)
    assert text == ("ab" if skip else "a<|im_start|>b") and stop is None
