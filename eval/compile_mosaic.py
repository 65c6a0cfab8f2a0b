"""Compile Mosaic kernels for an H200 without a GPU, through XLA and the CUDA plugin."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# What XLA wants to know of a device that is not there; only the capability matters to a kernel.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""


class Assembled(NamedTuple):
    """A Mosaic kernel, and what the assembler says of it. (How much shared memory a launch asks
    for is in neither.)"""

    ptx: str
    report: str


def mosaic_kernels(function: Callable, avals: Any) -> Iterator[Assembled]:
    """Those of a function of arguments of such shapes."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place), avals
    )
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        # The plugin's own switches, read at each compile.
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        jax.jit(function).lower(*placed).compile()
        for report in sorted(Path(folder).glob("*.ptxas")):
            yield Assembled(report.with_suffix(".ptx").read_text(), report.read_text())
