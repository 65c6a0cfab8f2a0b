"""grouped_matmul against one product per row in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul

RAGGED = {
    "one_row": [0, 1, 0],
    "one_row_each": [1] * 7,
    "few_rows_many_groups": [0, 3, 0, 0, 1, 0, 2, 0, 0],
    "one_group": [45],
    "all_in_the_last": [0, 0, 0, 37],
    "empty_groups": [9, 0, 0, 23, 8, 0],
    "more_than_a_tile": [100, 63, 1, 64, 65],
    "none": [0, 0, 0],
}


def inputs(sizes: list[int], rows: int, n: int = 11, k: int = 19) -> tuple[Any, ...]:
    rng = np.random.default_rng(len(sizes))
    x, w = rng.standard_normal((rows, k)), rng.standard_normal((len(sizes), n, k))
    return x.astype(np.float32), w.astype(np.float32), np.array(sizes, np.int32)


def oracle(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    group = np.repeat(np.arange(len(sizes)), sizes)
    y = np.zeros((len(x), w.shape[1]))
    for i, e in enumerate(group):
        y[i] = w[e].astype(np.float64) @ x[i].astype(np.float64)
    return y


@pytest.mark.parametrize("past", [0, 5], ids=["exact", "rows_past_the_groups"])
@pytest.mark.parametrize("name", RAGGED)
def test_matches_one_product_per_row(name: str, past: int) -> None:
    x, w, sizes = inputs(RAGGED[name], sum(RAGGED[name]) + past + (name == "none"))
    x[sizes.sum() :] = np.nan  # such rows are not read into any result
    found = np.asarray(jax.jit(grouped_matmul)(x, w, sizes))
    np.testing.assert_allclose(found, oracle(x, w, sizes), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [6, 200], ids=["few", "many"])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    """The same row among other rows and other group sizes, same static shape."""
    rng = np.random.default_rng(0)
    x, w, _ = inputs([0] * 6, rows)
    op = jax.jit(grouped_matmul)
    seen = []
    for _ in range(5):
        sizes = rng.multinomial(rows - 1, np.ones(6) / 6).astype(np.int32)
        sizes[2] += 1
        place = int(sizes[:2].sum())
        batch = rng.standard_normal(x.shape).astype(np.float32)
        batch[place] = x[0]
        seen.append(np.asarray(op(batch, w, sizes))[place])
    for row in seen[1:]:
        np.testing.assert_allclose(row, seen[0], rtol=0, atol=1e-6)


def test_unchosen_groups_are_not_read() -> None:
    x, w, sizes = inputs([0, 2, 0, 1, 0, 0], 3)
    w[[0, 2, 4, 5]] = np.nan
    assert np.isfinite(np.asarray(grouped_matmul(x, w, sizes))).all()


def test_accumulates_bfloat16_in_float32() -> None:
    for rows in (4, 300):
        x, w, sizes = inputs([rows, 0, 0, 0, 0], rows, k=512)
        a, b = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
        found = grouped_matmul(a, b, jnp.asarray(sizes))
        assert found.dtype == jnp.float32
        expected = oracle(np.asarray(a, np.float32), np.asarray(b, np.float32), sizes)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-4)


def test_gradients() -> None:
    """Training differentiates both forms."""
    for rows in (4, 60):
        x, w, sizes = inputs([rows - 2, 0, 1, 1, 0], rows)
        group = np.repeat(np.arange(5), sizes)

        def plain(x: jax.Array, w: jax.Array, group: np.ndarray = group) -> jax.Array:
            return jnp.sum(jnp.sin(jnp.einsum("mk,mnk->mn", x, w[group])))

        def grouped(x: jax.Array, w: jax.Array, sizes: np.ndarray = sizes) -> jax.Array:
            return jnp.sum(jnp.sin(grouped_matmul(x, w, jnp.asarray(sizes))))

        args = jnp.asarray(x), jnp.asarray(w)
        for a, b in zip(
            jax.grad(grouped, (0, 1))(*args), jax.grad(plain, (0, 1))(*args), strict=True
        ):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-4)
