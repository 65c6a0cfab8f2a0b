"""The attention kernel alone: lengths, head dims, tunings, hostile memory, lowering for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_paged_attention, ragged_paged_attention
from pallas_kernels.arg_specs import ATTENTION_SHAPES, AttentionShape
from pallas_kernels.paged_attention import api, library, tuning
from pallas_kernels.paged_attention.tuning import LEAST_PIECE, Cut, Tuning

from ..assertions import assert_close
from . import oracle
from .lowering import TRITON_CALL, lower_for_cuda
from .test_paged_attention import paged

LENGTHS = (1, 15, 16, 17, 63, 65, 2 * LEAST_PIECE - 1, 0)
F32_BOUND, BF16_BOUND = 1e-5, 5e-3
SMALL = Tuning(rows=16, block=16, warps=4, stages=2, rounds=1, piece=128)


@functools.cache
def compiled_decode(tuned: Tuning | None, scale: float, value_dim: int) -> Callable[..., Any]:
    options: Any = {"tuned": tuned, "scale": scale, "value_dim": value_dim, "interpret": True}
    return jax.jit(functools.partial(api.decode, **options))


class Inputs:
    """Sequences of `lengths` tokens with `new` queries each, pages full of NaN around them."""

    def __init__(
        self,
        shape: AttentionShape,
        lengths: tuple[int, ...],
        new: tuple[int, ...],
        *,
        dtype: Any = jnp.float32,
        size: float = 1.0,
        padding: int = 0,
    ) -> None:
        rng = np.random.default_rng(shape.key_dim)
        dims = shape.kv_heads, shape.key_dim, shape.value_dim
        keys, values, table, dense_k, dense_v = paged(rng, lengths, *dims)
        self.shape, self.new, self.scale = shape, new, shape.key_dim**-0.5
        self.cu = np.cumsum((0, *new)).astype(np.int32)
        tokens = int(self.cu[-1]) + padding
        self.positions = np.full(tokens, -1, np.int32)
        for n, (length, count) in enumerate(zip(lengths, new, strict=True)):
            self.positions[self.cu[n] : self.cu[n + 1]] = np.arange(length - count, length)
        q = size * rng.standard_normal((tokens, shape.heads, shape.key_dim))
        self.q = jnp.asarray(q, dtype)
        self.keys = jnp.asarray(keys, dtype)
        self.values = None if shape.latent else jnp.asarray(values, dtype)
        self.table = table
        if shape.latent:
            dense_v = [k[..., : shape.value_dim] for k in dense_k]
        self.dense = [
            tuple(np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in pair)
            for pair in zip(dense_k, dense_v, strict=True)
        ]

    def decode(self, tuned: Tuning | None = None, **changed: Any) -> np.ndarray:
        args = {"q": self.q, "positions": self.positions, "table": self.table} | changed
        run = compiled_decode(tuned, self.scale, self.shape.value_dim)
        o = run(args["q"], self.keys, self.values, 1, args["positions"], args["table"])
        return np.asarray(o.astype(jnp.float32))

    def prefill(self, tuned: Tuning | None = None) -> np.ndarray:
        options: Any = {"scale": self.scale, "value_dim": self.shape.value_dim, "interpret": True}
        run = jax.jit(functools.partial(api.prefill, tuned=tuned, **options))
        at = self.positions, self.cu, self.table
        o = run(self.q, self.keys, self.values, 1, *at)
        return np.asarray(o.astype(jnp.float32))

    def check(self, o: np.ndarray, bound: float) -> None:
        """Every sequence against the oracle, zeros where nothing is seen."""
        q = np.asarray(self.q.astype(jnp.float32))
        for n, (k, v) in enumerate(self.dense):
            part = slice(self.cu[n], self.cu[n + 1])
            if part.start < part.stop and len(k):
                expected = oracle.attention(q[part], k, v, self.positions[part], self.scale)
                assert_close(f"sequence {n} of {len(k)}", o[part], expected, bound)
        np.testing.assert_array_equal(o[self.positions < 0], 0)


GQA = AttentionShape("gqa", 6, 2, 48, 48)
LATENT = AttentionShape("latent", 20, 1, 48, 32, latent=True)
SHAPES = {
    "three heads a group, 32 + 16 channels": GQA,
    "one head a group, values of another width": AttentionShape("mha", 2, 2, 16, 32),
    "latents, more heads than rows": LATENT,
}


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, F32_BOUND), (jnp.bfloat16, BF16_BOUND)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_decode_of_any_length(shape: AttentionShape, dtype: Any, bound: float) -> None:
    x = Inputs(shape, LENGTHS, (1,) * len(LENGTHS), dtype=dtype)
    x.check(x.decode(SMALL), bound)


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, F32_BOUND), (jnp.bfloat16, BF16_BOUND)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_prefill_behind_prefixes(shape: AttentionShape, dtype: Any, bound: float) -> None:
    """Prefixes end within pages, a sequence is empty, the batch has padding behind it."""
    lengths, new = (1, 17, 0, 65, 250, 70), (1, 16, 0, 65, 3, 41)
    x = Inputs(shape, lengths, new, dtype=dtype, padding=5)
    x.check(x.prefill(SMALL), bound)


@pytest.mark.parametrize(
    "tuned",
    [
        Tuning(rows=64, block=32, warps=4, stages=1, rounds=4, piece=256),
        Tuning(rows=32, block=64, warps=8, stages=3, rounds=16, piece=1024),
        Tuning(rows=32, block=64, warps=8, stages=3, rounds=16, piece=1024, slack=8.0),
        None,
    ],
    ids=["64x32", "32x64", "32x64 lazy", "default"],
)
def test_tunings_change_no_result(tuned: Tuning | None) -> None:
    x = Inputs(GQA, (130, 33), (40, 33))  # with blocks of 64, most rows see nothing of a piece
    x.check(x.prefill(tuned), F32_BOUND)
    x = Inputs(GQA, (300, 33), (1, 1))
    x.check(x.decode(tuned), F32_BOUND)


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, F32_BOUND), (jnp.bfloat16, BF16_BOUND)])
@pytest.mark.parametrize("heads, dim", [(4, 144), (6, 144), (4, 32)], ids=str)
def test_few_queries_behind_prefixes(heads: int, dim: int, dtype: Any, bound: float) -> None:
    """Of one sequence and of several, with padding: a tile or two of the kernel's own tuning."""
    shape = AttentionShape("few", heads, 1, dim, dim)
    for lengths, new in (((300, 0), (31, 0)), ((290, 9, 0, 150), (8, 9, 0, 13))):
        x = Inputs(shape, lengths, new, dtype=dtype, padding=tuning.FEW - sum(new))
        x.check(x.prefill(), bound)


def cut_of(shape: AttentionShape, tokens: int, context: int) -> tuple[Cut, Tuning]:
    """Of the prefill of a bucket of two sequences."""
    found: list[tuple[Cut, Tuning]] = []

    def recorded(*args: Any) -> Cut:
        found.append((make_cut(*args), args[-1]))
        return found[-1][0]

    def ints(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.int32)

    options: Any = {"scale": 1.0, "value_dim": shape.value_dim, "interpret": True}
    avals = shape.queries(tokens), *shape.pages(9, 2, 16), ints()
    make_cut = tuning.make_cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "make_cut", recorded)
        run = functools.partial(api.prefill, **options)
        jax.eval_shape(run, *avals, ints(tokens), ints(3), ints(2, context // 16))
    return found[0]


def test_programs_of_few_queries_run_all_at_once() -> None:
    few, wide = (ATTENTION_SHAPES[f"gqa-{heads}x4x256"] for heads in (16, 24))
    cut, tuned = cut_of(few, 32, 32768)
    assert (cut.least, cut.most) == (32, 32)  # a tile and 4 kv heads: 128 of 132
    assert (tuned.rows, tuned.block, tuned.stages) == (128, 32, 3)
    cut, tuned = cut_of(wide, 32, 32768)
    assert (cut.least, cut.most) == (16, 16)  # two tiles
    assert (tuned.rows, tuned.block, tuned.stages) == (128, 64, 2)
    assert cut_of(wide, 32, 1024)[0].most == 8  # none is below LEAST_PIECE
    assert cut_of(few, 2048, 32768)[0].whole  # 66 tiles: twice the multiprocessors
    assert cut_of(ATTENTION_SHAPES["gqa-30x30x128"], 256, 32768)[0].most == 4  # of 150 units


@pytest.mark.parametrize("units, pieces", [(1, 132), (8, 16), (33, 4), (66, 2), (67, 1), (500, 1)])
def test_pieces_at_once(units: int, pieces: int) -> None:
    assert tuning.at_once(units, SMALL) == pieces


@pytest.mark.parametrize("units, pieces", [(1, 132), (131, 2), (132, 1), (264, 1)])
def test_pieces_that_fill_the_device(units: int, pieces: int) -> None:
    assert tuning.filling(units, SMALL) == pieces
    assert tuning.filling(264, replace(SMALL, rounds=4)) == 1


def test_uncut_tiles_write_their_outputs_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs(GQA, (130, 20), (30, 20), padding=3)
    monkeypatch.setattr(tuning, "PARTIAL_BYTES", 0)
    x.check(x.prefill(SMALL), F32_BOUND)


def test_a_whole_prompt_by_the_library() -> None:
    """Everything but cuDNN itself, which needs a GPU."""
    x = Inputs(GQA, (0, 61), (0, 61), padding=6)
    cu, table = x.cu[1:], x.table[1:]
    assert x.values is not None
    args = (x.q, x.keys, x.values, 1, jnp.asarray(cu), jnp.asarray(table))
    o = np.array(library.attend(*args, scale=x.scale, implementation="xla"))
    assert np.isfinite(o).all()
    o[61:] = 0
    x.check(o, F32_BOUND)


@pytest.mark.parametrize("size", [1e-6, 1e4], ids=["tiny", "huge"])
def test_logits_of_any_size(size: float) -> None:
    x = Inputs(GQA, (200, 17), (1, 1), size=size)
    x.check(x.decode(SMALL), F32_BOUND)
    x.check(x.decode(replace(SMALL, slack=8.0)), F32_BOUND)


def test_a_sequence_knows_nothing_of_its_neighbours() -> None:
    x = Inputs(GQA, (250, 90, 33), (1, 1, 1), dtype=jnp.bfloat16)
    together = x.decode(SMALL)
    for n in range(3):
        alone = np.where(np.arange(3) == n, x.positions, -1).astype(np.int32)
        np.testing.assert_array_equal(x.decode(SMALL, positions=alone)[n], together[n])


@pytest.mark.parametrize("tuned", [SMALL, replace(SMALL, piece=1024)], ids=["pieces", "whole"])
def test_gates(tuned: Tuning) -> None:
    """Beside the queries; the kernel that merges pieces multiplies, or XLA where there is none."""
    x = Inputs(GQA, LENGTHS, (1,) * len(LENGTHS), dtype=jnp.bfloat16)
    shape = (len(LENGTHS), GQA.heads, 2, GQA.value_dim)
    gates = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    gates[:, :, 0] = np.nan
    rounded = jnp.asarray(gates, jnp.bfloat16)
    options: Any = {"tuned": tuned, "scale": x.scale, "value_dim": GQA.value_dim}
    args = x.q, x.keys, x.values, 1, jnp.asarray(x.positions), jnp.asarray(x.table)
    found = api.decode(*args, gates=rounded, **options, interpret=True)
    gate = np.asarray(rounded, np.float64)[:, :, 1]
    right = x.decode(tuned).astype(np.float64) / (1 + np.exp(-gate))
    assert_close("gated", found.astype(jnp.float32), right, BF16_BOUND)
    by_xla = decode_paged_attention(*args, scale=x.scale, gates=rounded, implementation="xla")
    assert_close("by XLA", by_xla.astype(jnp.float32), right, BF16_BOUND)


def test_runs_are_identical() -> None:
    x = Inputs(LATENT, (250, 3), (1, 1), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(x.decode(SMALL), x.decode(SMALL))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", ATTENTION_SHAPES.values(), ids=list(ATTENTION_SHAPES))
def test_lowers_for_cuda(shape: AttentionShape, dtype: Any) -> None:
    options: dict[str, Any] = {"scale": 0.1, "implementation": "pallas"}
    options |= {"value_dim": shape.value_dim}

    def kernels(function: Callable[..., Any], tokens: int, sequences: int) -> int:
        def ints(*size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, jnp.int32)

        pages = shape.pages(4096, 2, 16, dtype)
        cu = () if function is decode_paged_attention else (ints(sequences + 1),)
        avals = (ints(), ints(tokens), *cu, ints(sequences, 2048))
        run = functools.partial(function, **options)
        text = lower_for_cuda(run, shape.queries(tokens, dtype), *pages, *avals)
        return text.count(TRITON_CALL)

    assert kernels(decode_paged_attention, 32, 32) == 2
    assert kernels(ragged_paged_attention, 32, 2) == 2
    assert kernels(ragged_paged_attention, 64, 2) == 2
    assert kernels(ragged_paged_attention, 8192, 2) == 1


def test_uncovered_shapes_are_refused_by_name() -> None:
    x = Inputs(AttentionShape("odd", 2, 1, 24, 24), (9,), (1,))
    args = (x.q, x.keys, x.values, 1, jnp.asarray(x.positions), jnp.asarray(x.table))
    with pytest.raises(NotImplementedError, match="key dim 24"):
        decode_paged_attention(*args, scale=1.0, implementation="pallas", interpret=True)
    decode_paged_attention(*args, scale=1.0)  # XLA takes any
