"""flash-linear-attention's Triton kernels, timed by replaying a CUDA graph."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.gated_delta_rule import unpack

from .device_time import median_span
from .kernel_cases import KernelCase


def available() -> bool:
    return all(importlib.util.find_spec(name) for name in ("fla", "torch"))


def _to_torch(x: jax.Array) -> Any:
    import torch

    wide = torch.from_numpy(np.array(x.astype("float32")))
    dtype = torch.bfloat16 if x.dtype == "bfloat16" else torch.float32
    return wide.to(device="cuda", dtype=dtype)


def _function(case: KernelCase) -> Callable[..., Any]:
    import fla.ops.gated_delta_rule as gdn  # pyright: ignore[reportMissingImports]
    import fla.ops.kda as kda  # pyright: ignore[reportMissingImports]

    if case.shape.per_channel:
        return kda.fused_recurrent_kda if case.decode else kda.chunk_kda
    if case.decode:
        return gdn.fused_recurrent_gated_delta_rule
    return gdn.chunk_gated_delta_rule


def _calls(case: KernelCase) -> list[Callable[[], Any]]:
    """One call a set of inputs. Sequences of a decode step are a batch; others are packed."""
    import torch

    function, calls = _function(case), []
    s = case.shape
    for seed in range(case.sets):
        data = case.data(seed)
        tensors = [_to_torch(x) for x in unpack(data.qkv, data.gates, s.key_dim)]
        lead = (case.sequences, 1) if case.decode else (1, case.tokens)
        q, k, v, g, beta = (x.reshape(*lead, *x.shape[1:]) for x in tensors)
        state = torch.randn(case.sequences, s.heads, s.key_dim, s.value_dim, device="cuda")
        options: dict[str, Any] = {}
        if not case.decode:
            cu = torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32) * case.length
            options["cu_seqlens"] = cu.long()

        def call(q: Any = q, k: Any = k, v: Any = v, g: Any = g, beta: Any = beta, h: Any = state,
                 options: Any = options) -> Any:  # fmt: skip
            return function(
                q=q, k=k, v=v, g=g, beta=beta, initial_state=h, output_final_state=True,
                use_qk_l2norm_in_kernel=True, **options,
            )  # fmt: skip

        calls.append(call)
    return calls


def seconds(case: KernelCase) -> float:
    """Device time of one call."""
    import torch

    with torch.no_grad():
        calls = _calls(case)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and autotunes outside the graph
            for _ in range(3):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # By default a call of any thread that might wait for the device spoils the capture, and
        # fails itself: such as those with which JAX frees what it has done with.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call()
        found = median_span(functools.partial(_span, graph))
        del graph
        torch.cuda.empty_cache()
    return found / len(calls)


def _span(graph: Any, rounds: int) -> float:
    """Seconds of the device for so many replays."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
