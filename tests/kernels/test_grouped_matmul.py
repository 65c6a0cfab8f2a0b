"""grouped_matmul against one product per row in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import kernel
from pallas_kernels.grouped_matmul.tuning import MatmulTuning

from ..assertions import assert_close
from .lowering import TRITON_CALL, lower_for_cuda

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


IMPLEMENTATIONS = ("xla", "pallas")


@functools.cache
def compiled(implementation: str, **options: Any) -> Callable[..., Any]:
    options |= {"implementation": implementation, "interpret": implementation == "pallas"}
    return jax.jit(functools.partial(grouped_matmul, **options))


def swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def inputs(sizes: list[int], rows: int, n: int = 32, k: int = 48) -> tuple[Any, ...]:
    rng = np.random.default_rng(len(sizes))
    x, w = rng.standard_normal((rows, k)), rng.standard_normal((len(sizes), n, k))
    return x.astype(np.float32), w.astype(np.float32), np.array(sizes, np.int32)


def oracle(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    group = np.repeat(np.arange(len(sizes)), sizes)
    y = np.zeros((len(x), w.shape[1]))
    for i, e in enumerate(group):
        y[i] = w[e].astype(np.float64) @ x[i].astype(np.float64)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("past", [0, 5], ids=["exact", "rows_past_the_groups"])
@pytest.mark.parametrize("name", RAGGED)
def test_matches_one_product_per_row(name: str, past: int, implementation: str) -> None:
    x, w, sizes = inputs(RAGGED[name], sum(RAGGED[name]) + past + (name == "none"))
    x[sizes.sum() :] = np.nan  # such rows are not read into any result
    found = np.asarray(compiled(implementation)(x, w, sizes))
    np.testing.assert_allclose(found, oracle(x, w, sizes), rtol=0, atol=4e-5)


def test_any_widths_in_xla() -> None:
    x, w, sizes = inputs([9, 0, 23], 32, n=11, k=19)
    found = np.asarray(compiled("xla")(x, w, sizes))
    np.testing.assert_allclose(found, oracle(x, w, sizes), rtol=0, atol=4e-5)
    with pytest.raises(NotImplementedError, match=r"w \(3, 11, 19\) float32: .* multiples of 16"):
        grouped_matmul(x, w, sizes, implementation="pallas", interpret=True)


def test_several_matrices_need_a_combination() -> None:
    x, w, sizes = inputs([3, 1], 4)
    with pytest.raises(ValueError, match=r"w is \(2, 32, 48\); expected \[E, G, N, K\] with"):
        grouped_matmul(x, w, sizes, combine=swiglu)
    with pytest.raises(ValueError, match=r"\[E, N, K\] without"):
        grouped_matmul(x, w[:, None], sizes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [[1, 0, 2, 0, 0], [40, 0, 7, 70, 1]], ids=["few", "many"])
def test_gathers_rows_and_combines_matrices(sizes: list[int], implementation: str) -> None:
    """Two matrices a group, one gating the other; each input row is used more than once."""
    x, w, group_sizes = inputs(sizes, 13, n=64)
    rows = np.random.default_rng(1).integers(0, 13, sum(sizes)).astype(np.int32)
    op = compiled(implementation, combine=swiglu, dtype=jnp.bfloat16)
    found = op(x, w.reshape(-1, 2, 32, 48), group_sizes, rows=rows)
    assert found.dtype == jnp.bfloat16
    both = oracle(x[rows], w, group_sizes)
    gate, up = both[:, :32], both[:, 32:]
    expected = gate / (1 + np.exp(-gate)) * up
    assert_close("y", np.asarray(found.astype(jnp.float32)), expected, 3e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [6, 200], ids=["few", "many"])
def test_a_row_does_not_depend_on_the_others(rows: int, implementation: str) -> None:
    """The same row among other rows and other group sizes, same static shape."""
    rng = np.random.default_rng(0)
    x, w, _ = inputs([0] * 6, rows)
    op = compiled(implementation)
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


@pytest.mark.parametrize("sizes", [[0, 3, 0, 1, 17, 2, *[0] * 24], [40, 0, 7]], ids=["few", "many"])
def test_groups_of_rows_given(sizes: list[int]) -> None:
    """Few rows go by them alone: sizes, which nobody needs to count then, are poisoned."""
    count = sum(sizes)
    x, w, group_sizes = inputs(sizes, count + 2)
    groups = np.repeat(np.arange(len(sizes) + 1), [*sizes, 2]).astype(np.int32)
    given = np.full_like(group_sizes, -1) if len(x) <= len(sizes) else group_sizes
    x[count:] = np.nan
    found = np.asarray(compiled("pallas")(x, w, given, groups=groups))
    np.testing.assert_allclose(found, oracle(x, w, group_sizes), rtol=0, atol=4e-5)
    np.testing.assert_array_equal(found[count:], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unchosen_groups_are_not_read(implementation: str) -> None:
    x, w, sizes = inputs([0, 2, 0, 1, 0, 0], 3)
    w[[0, 2, 4, 5]] = np.nan
    assert np.isfinite(np.asarray(compiled(implementation)(x, w, sizes))).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_accumulates_bfloat16_in_float32(implementation: str) -> None:
    for rows in (4, 300):
        x, w, sizes = inputs([rows, 0, 0, 0, 0], rows, k=512)
        a, b = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
        found = compiled(implementation)(a, b, jnp.asarray(sizes))
        assert found.dtype == jnp.float32
        expected = oracle(np.asarray(a, np.float32), np.asarray(b, np.float32), sizes)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "tuning",
    [
        MatmulTuning(16, 16, 16, warps=4, stages=1, products="tf32x3"),
        MatmulTuning(32, 32, 32, warps=4, stages=1, products="tf32x3", halve=True),
        MatmulTuning(128, 64, 16, warps=4, stages=1, products="tf32x3", halve=True),
    ],
    ids=["small", "halves", "large"],
)
def test_tunings_change_no_result(tuning: MatmulTuning) -> None:
    """Tiles of every fill: none, under half, exactly half, over half, full."""
    x, w, sizes = inputs([0, 5, 16, 64, 17, 33, 0, 128, 1], 270)
    found = kernel.grouped_matmul(x, w, jnp.asarray(sizes), tuning=tuning, interpret=True)
    assert_close("y", found, oracle(x, w, sizes), 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 16, 200, 1000, 8192])
def test_lowers_for_cuda(tokens: int, dtype: Any) -> None:
    """Qwen3.5-35B-A3B: 8 of 256 experts of width 512; Kimi-Linear is 2,304 and 1,024 wide."""
    for hidden, inner in ((2048, 512), (2304, 1024)):
        sizes, rows = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (256, 8 * tokens))
        first = functools.partial(
            grouped_matmul, implementation="pallas", combine=swiglu, dtype=dtype
        )
        x = jax.ShapeDtypeStruct((tokens, hidden), dtype)
        w = jax.ShapeDtypeStruct((256, 2, inner, hidden), dtype)
        text = lower_for_cuda(lambda x, w, s, r, op=first: op(x, w, s, rows=r), x, w, sizes, rows)
        assert text.count(TRITON_CALL) == 1
        second = functools.partial(grouped_matmul, implementation="pallas")
        x = jax.ShapeDtypeStruct((8 * tokens, inner), dtype)
        w = jax.ShapeDtypeStruct((256, hidden, inner), dtype)
        assert lower_for_cuda(second, x, w, sizes).count(TRITON_CALL) == 1


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
