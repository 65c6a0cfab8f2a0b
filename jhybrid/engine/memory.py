"""How many pages and slots the memory flags buy.

`--state-memory` is one budget for native slots, compressed slots and what the movers between them
need beside those, so that servers with and without compression are matched. A refresh (dasc-wr)
needs no memory of its own: it runs in the native slot of the request that it is for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from ..cache.host_store import HostStore
from ..cache.input_pages import InputPolicy
from ..config import ModelConfig, require
from ..models.group_inputs import EIGHT_BIT
from ..models.specs import cache_specs
from ..params import count_bytes
from .compression import Compression
from .config import EngineConfig

log = logging.getLogger(__name__)

CPU_POOL = 256 * 1024**2  # bytes for KV, and again for states, where nothing says how much is free
GPU_SHARE = 0.92  # of the device's memory; the rest is the runtime's
GPU_WORKSPACE = 3 * 1024**3  # activations and logits of a step
TRANSFER_SHARE = 0.1  # of what is left likewise, for what is on its way from host memory
STATE_SHARE = 0.4  # of what is left after the parameters and the workspace
TAIL_SHARE = 0.25  # of the KV memory, for the group inputs of tails
NATIVE_SHARE = 0.5  # at most, of a small state budget that also buys compressed slots


@dataclass(frozen=True)
class PoolSizes:
    """`watermark`: how many native slots the engine tries to keep free. `transfers`: bytes for what
    is on its way from host memory and not yet in its pages."""

    pages: int
    native_slots: int
    compressed_slots: int = 0
    watermark: int = 0
    input_pages: int = 0
    transfers: int = 0


def check_memory(config: ModelConfig, engine: EngineConfig, dtype: Any, context: int) -> None:
    """Refuse memory flags that are too small: ValueError names the flag and what it needs."""
    page_bytes, slot_bytes, input_bytes = unit_bytes(config, engine, dtype)
    needed = -(-context // engine.page_size)
    least = needed * page_bytes
    if engine.group_inputs and engine.group_input_memory is None:
        whole = engine.input_tail is None
        both = needed * (page_bytes + input_bytes)
        least = both if whole else int(least / (1 - TAIL_SHARE)) + input_bytes
    kv, state = engine.kv_memory, engine.state_memory
    enough = kv is None or kv >= least
    require(enough, "kv_memory", kv, f"at least {least} bytes for one request of {context} tokens")
    enough = state is None or state >= slot_bytes
    require(enough, "state_memory", state, f"at least {slot_bytes} bytes for one state")


def size_pools(
    config: ModelConfig,
    engine: EngineConfig,
    mesh: Mesh,
    dtype: Any,
    context: int,
    compression: Compression | None = None,
) -> PoolSizes:
    """What the memory flags (or the device's free memory) pay for.

    The pool of pages holds at least one request of the longest context, or it is a ValueError.
    """
    page_bytes, slot_bytes, input_bytes = unit_bytes(config, engine, dtype)
    free = _free_bytes(mesh)
    left = max(0, free - GPU_WORKSPACE) if free is not None else 0
    transfers = 0
    if engine.host_memory is not None:
        transfers = int(left * TRANSFER_SHARE) if free is not None else CPU_POOL
        left = max(0, left - transfers)
    kv = engine.kv_memory or (int(left * (1 - STATE_SHARE)) if free is not None else CPU_POOL)
    state = engine.state_memory or (int(left * STATE_SHARE) if free is not None else CPU_POOL)
    check_memory(config, replace(engine, kv_memory=kv, state_memory=state), dtype, context)
    pages, input_pages = split_pages(engine, kv, page_bytes, input_bytes)
    if engine.kv_memory is None:  # four times what all requests can fill is more than enough
        pages = min(pages, 4 * engine.max_running * -(-context // engine.page_size))
        input_pages = min(pages, input_pages)
    if compression is None:
        sizes = PoolSizes(pages, state // slot_bytes)
    else:
        compressed, scratch = compression.slot_bytes, compression.scratch_bytes
        sizes = split_states(engine, state, slot_bytes, compressed, scratch, pages)
    sizes = replace(sizes, input_pages=input_pages, transfers=transfers)
    log.info("KV: %d pages of %d tokens, %s", pages, engine.page_size, _gib(pages * page_bytes))
    if input_pages:
        log.info("group inputs: %d pages, %s", input_pages, _gib(input_pages * input_bytes))
    _log_states(sizes, slot_bytes, compression)
    if transfers:
        log.info("on the way from host memory: %s at most", _gib(transfers))
    return sizes


def split_pages(
    engine: EngineConfig, budget: int, page_bytes: int, input_bytes: int
) -> tuple[int, int]:
    """KV pages, and pages of group inputs: from a budget of their own, or out of the same one."""
    if engine.group_inputs is None:
        return budget // page_bytes, 0
    if input_bytes == 0:  # the embedding starts the only group
        return budget // page_bytes, budget // page_bytes
    if engine.group_input_memory is not None:
        inputs = engine.group_input_memory // input_bytes
        expected = f"at least {input_bytes} bytes for one page"
        require(inputs > 0, "group_input_memory", engine.group_input_memory, expected)
        return budget // page_bytes, inputs
    if engine.input_tail is None:
        pages = budget // (page_bytes + input_bytes)
        return pages, pages
    inputs = max(1, int(budget * TAIL_SHARE) // input_bytes)
    return (budget - inputs * input_bytes) // page_bytes, inputs


def split_states(
    engine: EngineConfig,
    budget: int,
    slot_bytes: int,
    compressed_bytes: int,
    scratch_bytes: int,
    pages: int,
) -> PoolSizes:
    """Native and compressed slots out of one budget in bytes, which pays for the scratch first.

    Native slots are for running requests and for the checkpoints that wait to be packed: those of
    one step, which are kept free. All else is compressed. `--native-slots` overrides.
    """
    staging = -(-engine.max_prefill_tokens // engine.checkpoint_interval) + min(
        engine.max_running, 8
    )
    native = engine.native_slots
    if native is None:
        most = int((budget - scratch_bytes) * NATIVE_SHARE) // slot_bytes
        native = max(1, min(engine.max_running + staging, most))
    compressed = (budget - scratch_bytes - native * slot_bytes) // compressed_bytes
    least = native * slot_bytes + compressed_bytes + scratch_bytes
    expected = f"at least {least} bytes for {native} native slots, a compressed one and moves"
    require(compressed >= 1, "state_memory", budget, expected)
    watermark = min(staging, max(native - engine.max_running, native // 2))
    return PoolSizes(pages, native, compressed, watermark)


def unit_bytes(config: ModelConfig, engine: EngineConfig, dtype: Any) -> tuple[int, int, int]:
    """Bytes of one KV page, of one native slot and of one page of group inputs, over all ranks."""
    inputs = int(engine.group_inputs is not None)
    one = cache_specs(config, 1, engine.page_size, 1, inputs, input_dtype(engine))
    page = count_bytes([one.keys, one.values], dtype)
    slot = count_bytes([one.recurrent, one.conv], dtype)
    return page, slot, count_bytes(one.group_inputs, dtype)


def input_dtype(engine: EngineConfig) -> Any:
    """Of the rows of group inputs; None for the model's."""
    return EIGHT_BIT if engine.group_input_dtype == "fp8" else None


def input_policy(engine: EngineConfig, pages: int) -> InputPolicy | None:
    """Whose group inputs the cache keeps in that many pages."""
    return InputPolicy(pages, engine.input_tail) if engine.group_inputs else None


def host_store(config: ModelConfig, engine: EngineConfig, dtype: Any) -> HostStore | None:
    """Host memory for pages and states that leave the device."""
    if engine.host_memory is None:
        return None
    page, slot, inputs = unit_bytes(config, engine, dtype)
    return HostStore(engine.host_memory, engine.page_size, page, inputs, slot)


def _log_states(sizes: PoolSizes, slot_bytes: int, compression: Compression | None) -> None:
    native = f"{sizes.native_slots} native slots of {_mib(slot_bytes)}"
    log.info("states: %s in %s", _gib(sizes.native_slots * slot_bytes), native)
    if compression is not None:
        log.info(
            "states: %d of those kept free; %s in %d compressed slots of %s; %s for moves",
            sizes.watermark,
            _gib(sizes.compressed_slots * compression.slot_bytes),
            sizes.compressed_slots,
            _mib(compression.slot_bytes),
            _mib(compression.scratch_bytes),
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def _free_bytes(mesh: Mesh) -> int | None:
    """Free bytes over all ranks of the mesh, or None where the device does not say."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(s is None or "bytes_limit" not in s for s in stats):
        return None
    free = [int(s["bytes_limit"] * GPU_SHARE) - s["bytes_in_use"] for s in stats]
    return min(free) * len(free)
