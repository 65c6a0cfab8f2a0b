"""Tokenizers: what transformers does not read by itself."""
