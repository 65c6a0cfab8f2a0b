"""Tunings of the gated delta rule's kernels worth timing, each kernel by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.decode import DecodeTuning, decode
from pallas_kernels.gated_delta_rule.inputs import SOFTPLUS, Gates
from pallas_kernels.gated_delta_rule.inverse import invert
from pallas_kernels.gated_delta_rule.prefill import ragged_prefill
from pallas_kernels.gated_delta_rule.prepare import prepare, products
from pallas_kernels.gated_delta_rule.scan import scan
from pallas_kernels.gated_delta_rule.tile import Options, Prepared
from pallas_kernels.gated_delta_rule.tuning import PrefillTuning
from pallas_kernels.ragged import make_tile_ranges

from .device_time import Loop
from .kernel_cases import Data, KernelCase
from .variant import Variant


def _product_tunings(default: PrefillTuning) -> Iterator[PrefillTuning]:
    for warps in (1, 2):
        for block in (32, 64, 128):
            yield replace(default, product_warps=warps, key_block=block)


def _invert_tunings(default: PrefillTuning) -> Iterator[PrefillTuning]:
    for warps in (1, 2):
        yield replace(default, invert_warps=warps)


def _scan_tunings(default: PrefillTuning) -> Iterator[PrefillTuning]:
    forms: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
        ({"value_block": 64, "turn_by_product": True}, (5,)),
        ({"value_block": 64, "turn_by_product": True, "scan_warps": 8}, (2, 3, 5)),
        ({"value_block": 64, "scan_warps": 8}, (2, 3, 4)),
        ({"value_block": 32}, (3, 4)),
        ({"value_block": 32, "scan_warps": 2}, (3, 4)),
        ({"value_block": 64, "transposed": False, "scan_warps": 8}, (3,)),
        ({"value_block": 32, "transposed": False}, (3,)),
    )
    for form, stages in forms:
        for n in stages:
            plain = {"turn_by_product": False, "scan_warps": 4}
            yield replace(default, **{**plain, **form}, scan_stages=n)


def variants(case: KernelCase, interpret: bool) -> list[Variant]:
    expected = 4 * case.floor_bytes / 4e12
    if case.decode:
        default = DecodeTuning.default(case.sequences, case.shape.heads)
        tunings = [
            DecodeTuning(block, warps)
            for block in (16, 32, 64, 128)
            for warps in (1, 2, 4, 8)
            if 8 <= block * case.shape.key_dim // (32 * warps) <= 128
        ]
        return [
            Variant("decode", t, default, _decode_loop(case, t, expected, interpret))
            for t in tunings[: 2 if interpret else None]
        ]
    default = PrefillTuning.default(jnp.bfloat16, case.shape.per_channel)
    out = [Variant("prefill", default, default, _prefill_loop(case, default, expected, interpret))]
    for kernel, make, tunings in (
        ("products", _products_loop, _product_tunings(default)),
        ("invert", _invert_loop, _invert_tunings(default)),
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
        return decode(
            data.qkv, data.gates, pool, 0, data.slots, SOFTPLUS,
            tuning=tuning, interpret=interpret,
        )  # fmt: skip

    return lambda: Loop(step, _sets(case), case.pool(), expected)


def _sets_of(gates: Gates) -> Gates:
    return gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])


def _prefill_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    def step(pool: Any, data: Data) -> Any:
        segments = case.segments(data.slots)
        return ragged_prefill(
            data.qkv, _sets_of(data.gates), pool, jnp.zeros_like(segments.load), None,
            segments, SOFTPLUS, tuning=tuning, interpret=interpret,
        )  # fmt: skip

    return lambda: Loop(step, _sets(case), case.pool(), expected)


def _options(case: KernelCase, tuning: PrefillTuning, interpret: bool) -> Options:
    s = case.shape
    return Options(s.key_dim, s.value_dim, SOFTPLUS, tuning, True, interpret)


def _prepare(case: KernelCase, options: Options, data: Data, make: Any = prepare) -> Prepared:
    tiles = make_tile_ranges(case.segments(data.slots).cu, case.tokens, options.tuning.chunk)
    return make(data.qkv, _sets_of(data.gates), jnp.zeros_like(tiles.start), tiles, options)


def _products_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    options = _options(case, tuning, interpret)

    def step(_: Any, data: Data) -> Any:
        return _prepare(case, options, data, products), ()

    return lambda: Loop(step, _sets(case), (), expected)


def _invert_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    options = _options(case, tuning, interpret)

    def step(a: Any, inputs: Any) -> Any:
        beta, rows = inputs
        return (), invert(a, beta, rows, tuning, interpret)  # of its own results: only time counts

    def make() -> Loop:
        data = case.data(0)
        made = jax.jit(lambda data: _prepare(case, options, data, products))(data)
        tiles = make_tile_ranges(case.segments(data.slots).cu, case.tokens, tuning.chunk)
        return Loop(step, [(made.beta, tiles.rows)], made.t, expected)

    return make


def _scan_loop(
    case: KernelCase, tuning: PrefillTuning, expected: float, interpret: bool
) -> Callable[[], Loop]:
    options = _options(case, tuning, interpret)

    def step(pool: Any, inputs: Any) -> Any:
        data, prepared = inputs
        segments = case.segments(data.slots)
        tiles = make_tile_ranges(segments.cu, case.tokens, tuning.chunk)
        layers = jnp.zeros_like(segments.load)
        return scan(prepared, data.qkv, pool, layers, segments, tiles, options)

    def make() -> Loop:
        data = case.data(0)
        prepared = jax.jit(lambda data: _prepare(case, options, data))(data)
        return Loop(step, [(data, prepared)], case.pool(), expected)

    return make
