"""The demo's byte-level tokenizer: a token id below 256 is that byte, the markers come after.

Written as Hugging Face files, so that serving it needs nothing special; training uses `encode` and
the ids below directly, because a byte string already is its token ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
TOKENS_USED = 263
VOCAB_SIZE = 272  # a multiple of 16, so that the embedding cuts over devices
MAX_CONTEXT = 8192

# ChatML. A message's content is text or a list of text parts; it is copied verbatim, which is what
# `continue_final_message` needs to find the end of the last message again.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant", "tool"] -%}
{{- raise_exception("unknown role: " ~ message.role) -}}
{%- endif -%}
{{- "<|im_start|>" ~ message.role ~ "\\n" -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- elif message.content is not none -%}
{%- for part in message.content -%}
{%- if part.type != "text" -%}
{{- raise_exception("only text content is supported, got: " ~ part.type) -}}
{%- endif -%}
{{- part.text -}}
{%- endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""


def encode(text: str) -> np.ndarray:
    """Token ids of plain text, as uint16. Markers written in the text stay text."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)


def build_tokenizer() -> tokenizers.Tokenizer:
    """A BPE without merges over the 256 byte symbols, plus the markers."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [tokenizers.AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(build_tokenizer().to_str(pretty=False) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
    }
    generation = {
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 stands for itself; the other bytes, in order, take the characters from
    U+0100 on. This is the convention that the ByteLevel pre-tokenizer and decoder follow.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
