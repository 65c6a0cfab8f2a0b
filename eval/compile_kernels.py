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
import jax.numpy as jnp

from pallas_kernels.arg_specs import HEAD_SHAPES, HeadShape, segments_shape
from pallas_kernels.gated_delta_rule.decode import decode
from pallas_kernels.gated_delta_rule.inputs import SOFTPLUS
from pallas_kernels.gated_delta_rule.prefill import ragged_prefill
from pallas_kernels.gated_delta_rule.tuning import PrefillTuning

# Bytes stored and loaded a thread, in any kernel for bf16 inputs. Preparing a chunk with 4 warps
# spills 64 to 244 of them and takes 0.6 of the time of 8 warps without a spill (measured).
SPILL_BUDGET = 256
TOKENS, SEGMENTS, SLOTS, BATCH = 2048, 4, 9, 32


class Resources(NamedTuple):
    """Of one compiled kernel."""

    name: str
    registers: int
    spills: int  # bytes
    shared: int  # bytes
    matrix_instructions: dict[str, int]
    barriers: int


def prefill_function(shape: HeadShape, tuning: PrefillTuning | None = None) -> tuple[Callable, Any]:
    """A prefill and its abstract arguments."""
    layers = jax.ShapeDtypeStruct((SEGMENTS,), jnp.int32)
    avals = (*shape.inputs(TOKENS), shape.pool(SLOTS), layers, segments_shape(SEGMENTS))

    def run(qkv: Any, gates: Any, pool: Any, layers: Any, segments: Any) -> Any:
        gates = gates._replace(A_log=gates.A_log[None], dt_bias=gates.dt_bias[None])
        return ragged_prefill(qkv, gates, pool, layers, None, segments, SOFTPLUS, tuning=tuning)

    return run, avals


def decode_function(shape: HeadShape, tuning: Any = None) -> tuple[Callable, Any]:
    slots = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    avals = (*shape.inputs(BATCH), shape.pool(BATCH + 1), slots)

    def run(qkv: Any, gates: Any, pool: Any, slots: Any) -> Any:
        return decode(qkv, gates, pool, 0, slots, SOFTPLUS, tuning=tuning)

    return run, avals


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
    report = _assemble(ptx)
    registers = int(_found(r"Used (\d+) registers", report))
    stores = int(_found(r"(\d+) bytes spill stores", report))
    loads = int(_found(r"(\d+) bytes spill loads", report))
    counted = {name: len(re.findall(name, ptx)) for name in ("wgmma.mma", "mma.sync")}
    barriers = len(re.findall(r"bar\.sync|barrier\.sync", ptx))
    name = ir.StringAttr(call["name"]).value
    return Resources(name, registers, stores + loads, done.smem_bytes, counted, barriers)


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
    return [compile_call(call) for call in triton_calls(lowered)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(HEAD_SHAPES))
    parser.add_argument("--budget", type=int, default=SPILL_BUDGET, metavar="BYTES")
    args = parser.parse_args()
    jax.devices()
    over = []
    for name in args.names or HEAD_SHAPES:
        for make in (prefill_function, decode_function):
            begin = time.perf_counter()
            for kernel in compile_function(*make(HEAD_SHAPES[name])):
                report(f"{name} {kernel.name}", kernel, time.perf_counter() - begin)
                if kernel.spills > args.budget:
                    over.append(f"{name} {kernel.name}: {kernel.spills} B")
    if over:
        sys.exit(f"spills over {args.budget} bytes: " + "; ".join(over))


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
