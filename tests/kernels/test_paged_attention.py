"""Attention over pages: ragged prefill and decode, NaN in everything unwritten."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_paged_attention, ragged_paged_attention, write_pages

from ..assertions import assert_close
from . import oracle

PAGE, PAGES, LAYERS, WIDTH = 4, 130, 2, 80


def paged(
    rng: np.random.Generator, lengths: tuple[int, ...], kv_heads: int, dim: int, value_dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Pools of NaN with the sequences' keys and values on scattered pages, and those dense."""
    keys = np.full((PAGES, LAYERS, PAGE, kv_heads, dim), np.nan, np.float32)
    values = np.full((PAGES, LAYERS, PAGE, kv_heads, value_dim), np.nan, np.float32)
    free = list(rng.permutation(PAGES - 1))
    table = np.full((len(lengths), WIDTH), -1, np.int32)
    dense_k, dense_v = [], []
    for n, length in enumerate(lengths):
        k = rng.standard_normal((length, kv_heads, dim)).astype(np.float32)
        v = rng.standard_normal((length, kv_heads, value_dim)).astype(np.float32)
        for position in range(length):
            if position % PAGE == 0:
                table[n, position // PAGE] = free.pop()
            page = table[n, position // PAGE]
            keys[page, 1, position % PAGE] = k[position]
            values[page, 1, position % PAGE] = v[position]
        dense_k.append(k)
        dense_v.append(v)
    return keys, values, table, dense_k, dense_v


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 3, 24), (5, 1, 8)])
def test_ragged_prefill_behind_a_prefix(heads: int, kv_heads: int, dim: int) -> None:
    rng = np.random.default_rng(heads)
    lengths, new = (150, 3, 70, 1), (20, 3, 70, 1)
    keys, values, table, dense_k, dense_v = paged(rng, lengths, kv_heads, dim, dim)
    q = rng.standard_normal((100, heads, dim)).astype(np.float32)
    positions = np.full(100, -1, np.int32)
    cu = np.cumsum((0, *new)).astype(np.int32)
    for n in range(4):
        positions[cu[n] : cu[n + 1]] = np.arange(lengths[n] - new[n], lengths[n])
    attend = jax.jit(ragged_paged_attention, static_argnames=("scale", "tile"))
    o = attend(q, keys, values, 1, positions, cu, table, scale=dim**-0.5, tile=16)
    for n in range(4):
        part = slice(cu[n], cu[n + 1])
        args = (q[part], dense_k[n], dense_v[n], positions[part], dim**-0.5)
        assert_close(f"sequence {n}", o[part], oracle.attention(*args), 1e-6)


def test_decode_with_a_padding_row() -> None:
    rng = np.random.default_rng(1)
    lengths = (131, 1, 40)
    keys, values, table, dense_k, dense_v = paged(rng, lengths, 2, 16, 16)
    q = rng.standard_normal((4, 4, 16)).astype(np.float32)
    positions = np.array([130, 0, 39, -1], np.int32)
    table = np.concatenate([table, np.full((1, WIDTH), -1, np.int32)])
    attend = jax.jit(decode_paged_attention, static_argnames="scale")
    o = attend(q, keys, values, 1, positions, table, scale=0.25)
    for n in range(3):
        args = (q[n : n + 1], dense_k[n], dense_v[n], positions[n : n + 1], 0.25)
        assert_close(f"sequence {n}", o[n : n + 1], oracle.attention(*args), 1e-6)
    np.testing.assert_array_equal(o[3], 0)


def test_latent_keys_serve_as_values() -> None:
    rng = np.random.default_rng(2)
    keys, _, table, dense_k, _ = paged(rng, (60,), 1, 24, 24)
    q = rng.standard_normal((1, 3, 24)).astype(np.float32)
    at = np.array([59], np.int32)
    args = (jnp.asarray(at), jnp.asarray(table))
    o = decode_paged_attention(
        jnp.asarray(q), jnp.asarray(keys), None, 1, *args, scale=0.2, value_dim=16
    )
    expected = oracle.attention(q, dense_k[0], dense_k[0][..., :16], at, 0.2)
    assert_close("o", o, expected, 1e-6)


def test_write_touches_only_its_slots() -> None:
    pages = jnp.full((5, 2, PAGE, 1, 2), jnp.nan)
    rows = jnp.arange(6.0).reshape(3, 1, 2)
    after = np.array(write_pages(pages, 1, rows, jnp.array([6, -1, 13], jnp.int32)))
    np.testing.assert_array_equal(after[1, 1, 2, 0], [0, 1])
    np.testing.assert_array_equal(after[3, 1, 1, 0], [4, 5])
    after[1, 1, 2], after[3, 1, 1] = np.nan, np.nan
    assert np.isnan(after).all()
