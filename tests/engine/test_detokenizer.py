"""Streamed text equals decoding everything at once, and characters stay whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jhybrid.engine.detokenizer import Detokenizer, TokenBytes
from tests.byte_tokenizer import byte_tokenizer

# Merges whose tokens end and begin inside characters: é is C3 A9, 日 is E6 97 A5.
TOKENIZER = byte_tokenizer(merges=[("Ã", "©"), ("æ", "Ĺ"), ("¥", "a")])
VOCAB = TokenBytes(TOKENIZER)
TEXT = "naïve é日a🦄 ไทย 👩‍👩‍👧 <think>x</think> plain"


def stream(ids, prompt=(), **options):
    detokenizer = Detokenizer(VOCAB, prompt, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_every_token_stands_for_the_bytes_that_the_tokenizer_gives_it():
    ids = TOKENIZER.encode(TEXT)
    assert b"".join(VOCAB[i] for i in ids) == TEXT.encode()
    assert VOCAB[len(TOKENIZER) + 5] == VOCAB[-1] == b""
    assert VOCAB.token_text(TOKENIZER.encode("é")[0]) == "é"
    assert VOCAB.token_text(TOKENIZER.encode("日")[0]) == "bytes:\\xe6\\x97"
    (end,) = TOKENIZER.encode("<|im_end|>")
    assert VOCAB.token_text(end) == "<|im_end|>"


def test_pieces_are_whole_characters():
    pieces = stream(TOKENIZER.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(TOKENIZER) + 4), max_size=40), st.booleans())
def test_streamed_is_decoded(ids, skip):
    known = [i for i in ids if i < len(TOKENIZER)]
    expected = TOKENIZER.decode(known, skip_special_tokens=skip)
    assert "".join(stream(ids, skip_special_tokens=skip)) == expected


@given(st.text(max_size=12), st.data())
def test_prompt_cut_anywhere(text, data):
    """Output begins with the character that the prompt ended inside of, and repeats no other."""
    ids = TOKENIZER.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    pieces = stream(output, prompt)
    whole = VOCAB.decode(prompt)
    if output:
        assert whole + "".join(pieces) == text
        assert ("\ufffd" in "".join(pieces)) <= ("\ufffd" in text)
    else:
        assert "".join(pieces) == ""


@pytest.mark.parametrize("output", ["plain", "é", "<|im_end|>x"])
def test_prompt_tail_that_the_output_does_not_continue_is_not_repeated(output):
    prompt = TOKENIZER.encode("a🦄")[:-2]
    expected = output.replace("<|im_end|>", "")
    assert "".join(stream(TOKENIZER.encode(output), prompt)) == expected


def test_leftover_of_a_cut_character_comes_at_the_end():
    ids = TOKENIZER.encode("a🦄")[:-1]
    assert stream(ids) == ["a", "", "", "", "\ufffd"]
    assert VOCAB.decode(ids) == "a"


def test_other_decoders_are_refused():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(NotImplementedError, match="Metaspace"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
