"""The letters that byte-level tokenizers write bytes with."""

from __future__ import annotations


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters.get(byte, chr(byte)) for byte in range(256)]
