"""Tunings of the gated delta rule's kernels worth timing, each kernel by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.decode import DecodeTuning, decode
from pallas_kernels.gated_delta_rule.prefill import ragged_prefill
from pallas_kernels.gated_delta_rule.prepare import prepare
from pallas_kernels.gated_delta_rule.scan import scan
from pallas_kernels.gated_delta_rule.tuning import PrefillTuning
from pallas_kernels.ragged import Segments, TileRanges, make_tile_ranges

from .device_time import Loop
from .kernel_cases import Data, KernelCase


@dataclass(frozen=True)
class Variant:
    """`kernel` is decode, prepare, scan or prefill (both)."""

    kernel: str
    tuning: Any
    default: Any
    loop: Callable[[], Loop]

    @property
    def label(self) -> str:
        """The fields that differ from the default."""
        changed = [
            f"{f.name}={getattr(self.tuning, f.name)}"
            for f in fields(self.tuning)
            if getattr(self.tuning, f.name) != getattr(self.default, f.name)
        ]
        return " ".join(changed) or "(default)"


def _prepare_tunings(default: PrefillTuning, per_channel: bool) -> Iterator[PrefillTuning]:
    for warps in (4, 8):
        for leaf in (1, 8, 16):
            yield replace(default, prepare_warps=warps, inverse_leaf=leaf)
        yield replace(default, prepare_warps=warps, inverse_products="bf16")
        if per_channel:
            for block in (16, 64):
                yield replace(default, prepare_warps=warps, key_block=block)
            yield replace(default, prepare_warps=warps, decay_leaf=8)
            yield replace(default, prepare_warps=warps, leaf_products="bf16")


def _scan_tunings(default: PrefillTuning) -> Iterator[PrefillTuning]:
    for block, warps in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8)):
        for stages in (1, 2, 3):
            yield replace(default, value_block=block, scan_warps=warps, scan_stages=stages)
    for block, warps in ((32, 4), (64, 4), (64, 8), (128, 8)):
        for stages in (1, 2, 3):
            yield replace(
                default, value_block=block, scan_warps=warps, scan_stages=stages, transposed=True
            )


def variants(case: KernelCase, interpret: bool) -> list[Variant]:
    expected = 4 * case.floor_bytes / 4e12
    if case.decode:
        default = DecodeTuning.default(case.sequences, case.shape.heads)
        tunings = [
            DecodeTuning(block, warps, evict_first)
            for block in (8, 16, 32, 64, 128)
            for warps in (1, 2, 4, 8)
            for evict_first in (False, True)
            if 8 <= block * case.shape.key_dim // (32 * warps) <= 128
        ]
        return [
            Variant("decode", t, default, _decode_loop(case, t, expected, interpret))
            for t in tunings[: 2 if interpret else None]
        ]
    default = PrefillTuning.default(jnp.bfloat16)
    out = [Variant("prefill", default, default, _prefill_loop(case, default, expected, interpret))]
    for kernel, make, tunings in (
        ("prepare", _prepare_loop, _prepare_tunings(default, case.shape.per_channel)),
        ("scan", _scan_loop, _scan_tunings(default)),
    ):
        for t in list(tunings)[: 2 if interpret else None]:
            out.append(Variant(kernel, t, default, make(case, t, expected, interpret)))
    return out


def _sets(case: KernelCase) -> list[Data]:
    return [case.data(seed) for seed in range(case.sets)]


def _decode_loop(
    case: KernelCase, tuning: DecodeTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    def step(pool: Any, data: Data) -> Any:
        return decode(*data.tensors, pool, 0, data.slots, tuning=tuning, interpret=interpret)

    def make() -> Loop:
        sets = _sets(case)
        return Loop(step, sets, case.pool(), expected)

    return make


def _prefill_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    def step(pool: Any, data: Data) -> Any:
        segments = case.segments(data.slots)
        return ragged_prefill(*data.tensors, pool, 0, segments, tuning=tuning, interpret=interpret)

    def make() -> Loop:
        sets = _sets(case)
        return Loop(step, sets, case.pool(), expected)

    return make


def _prepare_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    def step(_: Any, data: Data) -> Any:
        tiles = make_tile_ranges(case.segments(data.slots).cu, case.tokens, tuning.chunk)
        return prepare(*data.tensors, tiles, tuning, interpret=interpret), ()

    def make() -> Loop:
        return Loop(step, _sets(case), (), expected)

    return make


def _scan_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    def ranges(data: Data) -> tuple[Segments, TileRanges]:
        segments = case.segments(data.slots)
        return segments, make_tile_ranges(segments.cu, case.tokens, tuning.chunk)

    def step(pool: Any, inputs: Any) -> Any:
        data, prepared = inputs
        v = data.tensors[2]
        out = jax.ShapeDtypeStruct(v.shape, v.dtype)
        segments, tiles = ranges(data)
        return scan(prepared, pool, 0, segments, tiles, out, tuning, interpret=interpret)

    def make() -> Loop:
        data = case.data(0)

        def prepared_of(data: Data) -> Any:
            _, tiles = ranges(data)
            return prepare(*data.tensors, tiles, tuning, interpret=interpret)

        prepared = jax.jit(prepared_of)(data)
        return Loop(step, [(data, prepared)], case.pool(), expected)

    return make
