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
from pallas_kernels.gated_delta_rule.short_prefill import MOST_TOKENS, short_prefill
from pallas_kernels.gated_delta_rule.short_tile import ShortTuning
from pallas_kernels.gated_delta_rule.tile import Options, Prepared
from pallas_kernels.gated_delta_rule.tuning import PrefillTuning
from pallas_kernels.ragged import make_tile_ranges

from .device_time import Loop
from .kernel_cases import Data, KernelCase
from .kernel_check import error_of, reference
from .variant import Variant


def _product_tunings(default: PrefillTuning, per_channel: bool) -> Iterator[PrefillTuning]:
    cuts = ((1, 64), (2, 64), (2, 128)) if per_channel else ((4, 128), (8, 64), (8, 128))
    for warps, block in cuts:
        yield replace(default, product_warps=warps, key_block=block)


def _scan_tunings(default: PrefillTuning) -> Iterator[PrefillTuning]:
    forms: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
        ({"transposed": False}, (3, 4)),
        ({"transposed": True}, (3, 4)),
        ({"transposed": False, "value_block": 64}, (3,)),
        ({"transposed": True, "value_block": 64}, (3,)),
        ({"transposed": True, "value_block": 64, "turn_by_product": True}, (3,)),
    )
    narrow = replace(default, value_block=32, turn_by_product=False)
    for form, stages in forms:
        for n in stages:
            yield replace(narrow, **form, scan_stages=n)


def _decode_tunings(default: DecodeTuning) -> Iterator[DecodeTuning]:
    for block, warps in ((16, 2), (32, 4), (64, 2), (64, 4)):  # every default is one of them
        yield replace(default, value_block=block, warps=warps)


def _short_tunings(per_channel: bool) -> Iterator[ShortTuning]:
    yield ShortTuning()
    yield from (ShortTuning(16, 16, 4), ShortTuning(16, 16, 2))
    if not per_channel:
        of_32 = (16, 2), (16, 4), (32, 4), (64, 8)
        yield from (ShortTuning(32, block, warps) for block, warps in of_32)


def variants(case: KernelCase, interpret: bool) -> list[Variant]:
    """Each of a long prefill's kernels by itself, and the whole, of which the error always is."""
    expected = 4 * case.floor_bytes / 4e12
    most = 2 if interpret else None
    answer = reference(case)
    if case.decode:
        s = case.shape
        default = DecodeTuning.default(case.sequences, s.heads, s.key_dim, s.value_dim)
        steps = [(t, _decode_step(t, interpret)) for t in list(_decode_tunings(default))[:most]]
        return [
            Variant("decode", t, default, _loop(case, step, expected), _check(case, step, answer))
            for t, step in steps
        ]
    per_channel = case.shape.per_channel
    if case.tokens <= MOST_TOKENS:
        forms = [(t, _prefill_step(case, t, interpret)) for t in _short_tunings(per_channel)]
        return [
            Variant(
                "short", t, ShortTuning(), _loop(case, step, expected), _check(case, step, answer)
            )
            for t, step in forms[:most]
        ]
    columns = case.sequences * case.shape.heads * case.shape.value_dim
    default = PrefillTuning.default(jnp.bfloat16, per_channel, columns)
    whole = _prefill_step(case, default, interpret)
    check = _check(case, whole, answer)
    out = [Variant("prefill", default, default, _loop(case, whole, expected), check)]
    for kernel, make, tunings in (
        ("products", _products_loop, _product_tunings(default, per_channel)),
        ("invert", _invert_loop, (default,)),
        ("scan", _scan_loop, _scan_tunings(default)),
    ):
        for t in list(tunings)[:most]:
            check = _check(case, _prefill_step(case, t, interpret), answer)
            out.append(Variant(kernel, t, default, make(case, t, expected, interpret), check))
    return out


Step = Callable[[Any, Data], Any]  # (pool, data) -> (o, pool)
Answer = tuple[jax.Array, jax.Array]


def _check(case: KernelCase, step: Step, answer: Answer) -> Callable[[], float]:
    return lambda: error_of(case, jax.jit(step), answer)


def _loop(case: KernelCase, step: Step, expected: float) -> Callable[[], Loop]:
    return lambda: Loop(step, _sets(case), case.pool(), expected)


def _sets(case: KernelCase) -> list[Data]:
    return [case.data(seed) for seed in range(case.sets)]


def _decode_step(tuning: DecodeTuning, interpret: bool) -> Step:
    def step(pool: Any, data: Data) -> Any:
        return decode(
            data.qkv, data.gates, pool, 0, data.slots, SOFTPLUS,
            tuning=tuning, interpret=interpret,
        )  # fmt: skip

    return step


def _sets_of(gates: Gates) -> Gates:
    return gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])


def _prefill_step(case: KernelCase, tuning: PrefillTuning | ShortTuning, interpret: bool) -> Step:
    prefill: Any = short_prefill if isinstance(tuning, ShortTuning) else ragged_prefill

    def step(pool: Any, data: Data) -> Any:
        segments = case.segments(data.slots)
        return prefill(
            data.qkv, _sets_of(data.gates), pool, jnp.zeros_like(segments.load), None,
            segments, SOFTPLUS, tuning=tuning, interpret=interpret,
        )  # fmt: skip

    return step


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
