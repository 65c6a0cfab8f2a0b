"""Suite `kernels`: device time of the kernels, checked first, beside their peers.

Arms: `pallas`, `auto` (what attention picks for a prefill), `xla` (the reference form), `fla`
(flash-linear-attention, when importable), `cudnn` (attention of one dense causal sequence) and
`floor` (every byte moved once at the rate of a copy, or every product done at the rate of a large
one, both measured in the same run). A kernel whose check against the reference is red gets no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jhybrid.config import require

from . import fla_peer
from .attention_cases import AttentionCase, attention_cases, tiny_attention_cases
from .device_time import REPEAT, Loop, copy_rate, matrix_rate
from .flags import names_of, texts
from .kernel_cases import Data, KernelCase, delta_rule_cases, tiny_cases
from .kernel_check import error_of, op, reference
from .kernel_variants import variants
from .op_case import OpCase
from .op_cases import op_cases, tiny_op_cases
from .product_cases import product_cases, tiny_product_cases
from .results import Result, ResultsFile
from .tiled_case import tiled_cases, tiny_tiled_cases
from .variant import Variant

Case = KernelCase | AttentionCase | OpCase

# Cases, and tiny ones for a dry run. `delta-rule` has every row that is compared with peers.
SETS: dict[str, tuple[Callable[[], Sequence[Case]], Callable[[], Sequence[Case]]]] = {
    "delta-rule": (delta_rule_cases, tiny_cases),
    "attention": (attention_cases, tiny_attention_cases),
    "ops": (op_cases, tiny_op_cases),
    "products": (product_cases, tiny_product_cases),
    "tiled": (tiled_cases, tiny_tiled_cases),
}
ARMS = ("pallas", "auto", "xla", "fla", "cudnn")
TOGETHER = 8  # cases whose inputs are on the device at once
BOUND = 5e-3  # relative RMS, bf16 inputs against float32 arithmetic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--set", choices=SETS, help="cases of one kind (default: all)")
    parser.add_argument(
        "--cases", type=texts, default=[], metavar="TEXT,...", help="parts of case names"
    )
    parser.add_argument("--arms", type=names_of(ARMS), default=",".join(ARMS), metavar="ARM,...")
    parser.add_argument("--variants", action="store_true", help="time tunings, not arms")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases, interpreted")


def run(args: argparse.Namespace) -> None:
    if not args.dry_run and jax.default_backend() != "gpu":
        raise ValueError("times of kernels need a GPU; --dry-run interprets tiny cases")
    results = ResultsFile(args.out)
    sets = SETS.values() if args.set is None else [SETS[args.set]]
    cases = [case for of_set in sets for case in of_set[args.dry_run]()]
    for part in args.cases:
        some = any(part in case.name for case in cases)
        require(some, "--cases", part, f"part of one of {', '.join(c.name for c in cases)}")
    cases = [c for c in cases if not args.cases or any(part in c.name for part in args.cases)]
    rate = copy_rate(1 << 20 if args.dry_run else 1 << 31)
    results.append(Result("kernels", "copy", "xla", "rate", rate / 1e12, "TB/s", REPEAT))
    products = matrix_rate(64 if args.dry_run else 8192)
    results.append(Result("kernels", "product", "xla", "rate", products / 1e12, "TFLOP/s", REPEAT))
    print(f"copy {rate / 1e12:.2f} TB/s, products {products / 1e12:.0f} TFLOP/s", flush=True)
    if args.variants:
        _run_variants(cases, results, args.dry_run)
    else:
        _run_arms(cases, results, (rate, products), args.arms, args.dry_run)


def check(case: Case, interpret: bool) -> float:
    """The larger relative RMS of outputs and states, against float32 arithmetic in XLA."""
    if not isinstance(case, KernelCase):
        return case.check(interpret)

    def step(pool: Any, data: Data) -> Any:
        return op(case, pool, data, "pallas", interpret)

    return error_of(case, jax.jit(step), reference(case))


def _loop(case: Case, implementation: str, expected: float, interpret: bool) -> Loop | None:
    """None where an arm does not serve the case."""
    if not isinstance(case, KernelCase):
        return case.loop(implementation, expected, interpret)
    if implementation not in ("pallas", "xla"):
        return None
    sets = [case.data(seed) for seed in range(case.sets)]

    def step(pool: Any, data: Data) -> Any:
        return op(case, pool, data, implementation, interpret)

    return Loop(step, sets, case.pool(), expected)


def _bound(case: Case) -> float:
    return case.bound if isinstance(case, OpCase) else BOUND


def _build(
    case: Case, floor: float, arms: list[str], interpret: bool
) -> tuple[float, dict[str, Loop]]:
    """The error of the kernel, and the compiled loops of the arms that may be timed."""
    error = check(case, interpret)
    expected = {"pallas": 6 * floor, "auto": 3 * floor, "xla": 60 * floor, "cudnn": 2 * floor}
    loops = {
        arm: loop
        for arm, seconds in expected.items()
        if arm in arms and not (error > _bound(case) and arm == "pallas")
        if (loop := _loop(case, arm, seconds, interpret)) is not None
    }
    for loop in loops.values():
        loop.compile()
    return error, loops


def _run_arms(
    cases: list[Case],
    results: ResultsFile,
    rates: tuple[float, float],
    arms: list[str],
    interpret: bool,
) -> None:
    table: dict[str, dict[str, float]] = {}
    for first in range(0, len(cases), TOGETHER):
        _time_arms(cases[first : first + TOGETHER], results, rates, arms, interpret, table)
    print("\n" + _row("", {}))
    for name, times in table.items():
        print(_row(name, times))


def _time_arms(
    cases: list[Case],
    results: ResultsFile,
    rates: tuple[float, float],
    arms: list[str],
    interpret: bool,
    table: dict[str, dict[str, float]],
) -> None:
    """All are checked and compiled on many cores first; then the device is timed, alone."""
    floors = [case.floor_seconds(*rates) for case in cases]
    with ThreadPoolExecutor(TOGETHER) as threads:
        builds = [
            threads.submit(_build, case, floor, arms, interpret)
            for case, floor in zip(cases, floors, strict=True)
        ]
    for case, floor in zip(cases, floors, strict=True):
        build = builds.pop(0)  # its inputs go when it is done
        times = table.setdefault(case.name, {"floor": floor})
        if failure := build.exception():  # of one case must not lose the others' numbers
            print(f"{case.name:44} failed: {failure!r:.300}", flush=True)
            continue
        error, loops = build.result()
        results.append(Result("kernels", case.name, "pallas", "error", error, "relative RMS", 1))
        red = " RED: no time" if error > _bound(case) else ""
        print(f"{case.name:44} error {error:.1e}{red}", flush=True)
        for arm, loop in loops.items():
            times[arm] = loop.seconds()
        loops.clear()
        if "fla" in arms and isinstance(case, KernelCase) and fla_peer.available():
            try:
                times["fla"] = fla_peer.seconds(case)
            except Exception as error:  # a peer's failure, likewise
                print(f"{case.name:44} fla failed: {error!r:.300}", flush=True)
        for arm, value in times.items():
            results.append(Result("kernels", case.name, arm, "time", 1e3 * value, "ms", REPEAT))
        print(_row(case.name, times), flush=True)


COLUMNS = (*ARMS, "floor")


def _row(name: str, times: dict[str, float]) -> str:
    if not times:
        heads = "".join(f"{column:>11}" for column in COLUMNS)
        return f"{'device time, ms':44}{heads}    fla/pallas  pallas/floor"
    cells = "".join(f"{1e3 * times[c]:11.4f}" if c in times else f"{'-':>11}" for c in COLUMNS)
    ours = times.get("pallas")
    against = f"{times['fla'] / ours:14.2f}" if ours and "fla" in times else f"{'-':>14}"
    return f"{name:44}{cells}{against}" + (f"{ours / times['floor']:14.1f}" if ours else "")


def _run_variants(cases: list[Case], results: ResultsFile, interpret: bool) -> None:
    for case in cases:
        found: list[tuple[float, float | None, Variant]] = []
        mine = isinstance(case, KernelCase)
        batch = variants(case, interpret) if mine else case.variants(interpret)
        with ThreadPoolExecutor(8) as threads:
            loops = list(threads.map(_try_compile, batch))
        for variant, (loop, off) in zip(batch, loops, strict=True):
            if loop is None:
                continue
            try:
                seconds = loop.seconds()
            except Exception as failure:
                print(f"  {variant.kernel} {variant.label}: {failure!r:.200}", flush=True)
                continue
            found.append((seconds, off, variant))
            name = f"{variant.kernel}: {variant.tuning}"
            results.append(Result("kernels", case.name, name, "time", 1e3 * seconds, "ms", REPEAT))
            if off is not None:
                results.append(Result("kernels", case.name, name, "error", off, "relative RMS", 1))
        print(f"{case.name}", flush=True)
        for seconds, off, variant in sorted(found, key=lambda row: (row[2].kernel, row[0])):
            error = "" if off is None else f"error {off:.1e}"
            time = f"{1e3 * seconds:9.4f} ms"
            print(f"  {variant.kernel:8} {time}  {error:14} {variant.label}", flush=True)


def _try_compile(variant: Variant) -> tuple[Loop | None, float | None]:
    """The compiled loop, None if there is none to time, and the error found."""
    off = None
    try:
        if variant.check is not None and not (off := variant.check()) <= BOUND:
            print(f"  {variant.kernel} {variant.label}: RED {off:.1e}, no time", flush=True)
            return None, off
        loop = variant.loop()
        if loop is not None:
            loop.compile()
    except Exception as failure:  # too much shared memory, for one
        print(f"  {variant.kernel} {variant.label}: {failure!r:.200}", flush=True)
        return None, off
    return loop, off
