"""The demo's tokenizer files, as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from jhybrid.demo.tokenizer import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    TOKENS_USED,
    VOCAB_SIZE,
    build_tokenizer,
    encode,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


def test_files(folder: Path) -> None:
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == names | {"generation_config.json"}
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [IM_END, END_OF_TEXT]


def test_vocabulary(tokenizer) -> None:
    assert len(tokenizer) == TOKENS_USED <= VOCAB_SIZE
    assert VOCAB_SIZE % 16 == 0
    assert tokenizer.eos_token_id == IM_END
    assert tokenizer.pad_token_id == END_OF_TEXT
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(markers) == [END_OF_TEXT, IM_START, IM_END]
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert tokenizer.convert_tokens_to_ids(tags) == [259, 260, 261, 262]


def test_every_byte_is_its_own_id() -> None:
    tokenizer = build_tokenizer()
    text = "".join(chr(i) for i in range(0x250)) + "\u65e5\U0001f642"
    assert tokenizer.encode(text).ids == list(text.encode()) == encode(text).tolist()
    assert {*range(0x80, 0xC0)} <= set(text.encode())


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_round_trip(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_skipped_and_tags_are_not(tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert ids == [97, IM_END, 259, 98]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_chat_template(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "!"}],
        },
    ]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi !<|im_end|>\n"

    def render(messages: list, **options: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    assert render(messages) == text
    start = "<|im_start|>assistant\n"
    assert render(messages, add_generation_prompt=True) == text + start
    begun = [*messages, {"role": "assistant", "content": "Once"}]
    assert render(begun, continue_final_message=True) == text + start + "Once"
    assert render([{"role": "assistant", "content": None}]) == start + "<|im_end|>\n"


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"role": "robot", "content": "x"}, "unknown role: robot"),
        ({"role": "user", "content": [{"type": "image"}]}, "only text content"),
    ],
    ids=["role", "image"],
)
def test_chat_template_refuses(tokenizer, message: dict, match: str) -> None:
    with pytest.raises(Exception, match=match):
        tokenizer.apply_chat_template([message], tokenize=False)
