"""What every test runs under: eight CPU devices and strict promotion of dtypes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Before the first import of jax, which reads them once.
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
# Programs are compiled more often than they run. So they compile in a fifth of the time of level 1
# and run 2.5 times longer.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    + os.environ.get("XLA_FLAGS", "")
)
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import pytest
from jax.sharding import Mesh

from jhybrid.engine.programs import CPU_OPTIONS

CPU_OPTIONS.clear()  # the flags above hold for the engine's programs too
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Engines of the same shapes recur over tests and workers: let them share what is compiled.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / "build" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_collection_finish() -> None:
    """Tracing makes much garbage: let its collection pass over what the modules hold for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """A mesh of one device."""
    from jhybrid.sharding import make_mesh

    return make_mesh(1)
