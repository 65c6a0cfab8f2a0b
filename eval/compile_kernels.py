"""Compile the kernels for an H200 without a GPU, and fail when registers spill.

    JAX_PLATFORMS=cpu python -m jhybrid.eval.compile_kernels [--budget BYTES] [NAME ...]

Needs jax 0.10.2 (a later one has no separate Triton compiler to call) with the wheels
jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12. Outside the default test run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin would ask for a driver

import jax

from .compile_mosaic import mosaic_kernels
from .compiled_functions import NAMES, functions

# Bytes stored and loaded a thread, in any kernel for bf16 inputs. KDA's products spill most, and
# are faster so than with fewer channels at a time and no spill (measured). XLA's own passes, which
# do not run here, leave 184 of their 520.
SPILL_BUDGET = 544
# Queries, sums and a block of scores fill the registers of a program for prefill; what it spills is
# mostly addresses that it needs once (1,076 bytes in groups of six whose tiles are cut).
ATTENTION_BUDGET = {"gqa": 1088, "mla": 1792}


class Resources(NamedTuple):
    """Of one compiled kernel."""

    name: str
    registers: int
    spills: int  # bytes
    shared: int  # bytes
    matrix_instructions: dict[str, int]
    barriers: int


def triton_calls(lowered: Any) -> Iterator[dict[str, Any]]:
    """The attributes of every Triton kernel in a lowered function."""
    from jaxlib.mlir import ir

    pending = [lowered.compiler_ir().operation]
    while pending:
        for region in pending.pop().regions:
            for block in region.blocks:
                for op in block.operations:
                    pending.append(op.operation)
                    if op.operation.name != "stablehlo.custom_call":
                        continue
                    if "triton" in str(op.attributes["call_target_name"]):
                        config = ir.DictAttr(op.attributes["mhlo.backend_config"])
                        yield {item.name: item.attr for item in config}


def compile_call(call: dict[str, Any]) -> Resources:
    from jax._src.lib import triton
    from jaxlib.mlir import ir

    text = ir.StringAttr(call["ir"]).value_bytes
    warps, stages = (ir.IntegerAttr(call[name]).value for name in ("num_warps", "num_stages"))
    done = triton.compile("cuda", text, "9.0", num_warps=warps, num_ctas=1, num_stages=stages)
    ptx = done.asm if isinstance(done.asm, str) else done.asm.decode()
    return _resources(ir.StringAttr(call["name"]).value, ptx, _assemble(ptx), done.smem_bytes)


def _resources(name: str, ptx: str, report: str, shared: int) -> Resources:
    registers = int(_found(r"Used (\d+) registers", report))
    stores = int(_found(r"(\d+) bytes spill stores", report))
    loads = int(_found(r"(\d+) bytes spill loads", report))
    counted = {name: len(re.findall(name, ptx)) for name in ("wgmma.mma", "mma.sync")}
    barriers = len(re.findall(r"bar\.sync|barrier\.sync", ptx))
    return Resources(name, registers, stores + loads, shared, counted, barriers)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"ptxas reported nothing like {pattern!r}:\n{text}")
    return match[1]


def _assemble(ptx: str) -> str:
    """What ptxas says of the kernel."""
    import nvidia.cuda_nvcc as nvcc  # pyright: ignore[reportMissingImports]

    ptxas = Path(next(iter(nvcc.__path__))) / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-arch=sm_90a", "-v", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr


def compile_function(function: Callable, avals: Any) -> list[Resources]:
    lowered = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",))
    done = [compile_call(call) for call in triton_calls(lowered)]
    if "mosaic_gpu" in lowered.as_text():
        kernels = mosaic_kernels(function, avals)
        done += [_resources("mosaic", kernel.ptx, kernel.report, 0) for kernel in kernels]
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(NAMES))
    parser.add_argument("--budget", type=int, metavar="BYTES", help="of every kernel")
    args = parser.parse_args()
    jax.devices()
    over = []
    for name in args.names or NAMES:
        budget = ATTENTION_BUDGET.get(name.partition("-")[0], SPILL_BUDGET)
        budget = budget if args.budget is None else args.budget
        for function, avals in functions(name):
            begin = time.perf_counter()
            for kernel in compile_function(function, avals):
                report(f"{name} {kernel.name}", kernel, time.perf_counter() - begin)
                if kernel.spills > budget:
                    over.append(f"{name} {kernel.name}: {kernel.spills} B over {budget}")
    if over:
        sys.exit("too many bytes spilled: " + "; ".join(over))


def report(name: str, kernel: Resources, seconds: float) -> None:
    products = " ".join(f"{key} {n}" for key, n in kernel.matrix_instructions.items() if n)
    print(
        f"{name:52} {kernel.registers:4} registers {kernel.spills:6} B spilled "
        f"{kernel.shared / 1024:6.1f} KiB shared {kernel.barriers:4} barriers {products} "
        f"{seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
