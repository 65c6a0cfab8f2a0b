"""Token ids to text, one token at a time, without ever splitting a character.

Works on bytes: a byte-level token is a byte string, and text is the UTF-8 decoding of the
joined bytes. So a character whose bytes are spread over tokens appears when it is whole, and
joining the pieces gives exactly what decoding all tokens at once gives.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any

from jhybrid.tokenizer.byte_level import byte_letters


class TokenBytes:
    """The bytes of every token of a byte-level tokenizer; built once, shared by all requests."""

    def __init__(self, tokenizer: Any) -> None:
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if part]
        if kinds != ["ByteLevel"]:
            raise NotImplementedError(f"tokenizer decoder {kinds}: only ByteLevel is supported")
        to_byte = {letter: byte for byte, letter in enumerate(byte_letters())}
        added = tokenizer.added_tokens_decoder
        vocab: dict[str, int] = tokenizer.get_vocab()
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            # Added tokens are text, not letters of the byte alphabet ("é" is one of those).
            if token_id in added or not all(letter in to_byte for letter in token):
                table[token_id] = token.encode("utf-8")
            else:
                table[token_id] = bytes(to_byte[letter] for letter in token)
        self._table = table
        self.special_ids = frozenset(i for i, token in added.items() if token.special) | frozenset(
            tokenizer.all_special_ids
        )

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of a token; none for the padding ids above the tokenizer's vocabulary."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def token_text(self, token_id: int) -> str:
        r"""A token's own text for logprob fields; pieces of characters read `bytes:\xe2\x82`."""
        data = self[token_id]
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of complete characters; a character cut off at the end is left out."""
        decoder = _utf8_decoder()
        skipped = self.special_ids if skip_special_tokens else ()
        return decoder.decode(b"".join(self[i] for i in token_ids if i not in skipped))


class Detokenizer:
    """Incremental text of one request's output.

    When the prompt ends inside a character that the output completes, the whole character
    belongs to the output; when the output does not complete it, nothing of it is repeated.
    """

    def __init__(
        self,
        vocab: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._vocab = vocab
        self._skipped = vocab.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder()
        self._prompt_tail = _incomplete_tail(vocab, prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; often empty inside a character."""
        data = b"" if token_id in self._skipped else self._vocab[token_id]
        if data and self._prompt_tail:
            if _continues(self._prompt_tail, data[:1]):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left of a character that never became whole, as U+FFFD; usually empty."""
        return self._decoder.decode(b"", True)


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _incomplete_tail(vocab: TokenBytes, token_ids: Sequence[int]) -> bytes:
    """Bytes at the prompt's end that begin a character (three at most)."""
    tail = b""
    for token_id in reversed(token_ids):
        if len(tail) >= 3 or token_id in vocab.special_ids:
            break
        tail = vocab[token_id] + tail
    decoder = _utf8_decoder()
    decoder.decode(tail[-3:])
    pending = decoder.getstate()[0]
    assert isinstance(pending, bytes)
    return pending


def _continues(begun: bytes, byte: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True
