"""Plans as batches: buckets, and which step is one whole prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jhybrid.batch import PrefillBatch
from jhybrid.engine.buckets import make_buckets
from jhybrid.packed import Packed, unpack

from .tiny import request, run, tiny_engine


def test_a_step_of_one_fresh_prompt_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    runner, seen = engine.runner, []

    def prefill(packed: Packed, between: Any, inner: Any = runner.prefill) -> Any:
        batch: PrefillBatch = unpack(packed)
        last = int(batch.cu_seqlens[-1])
        sequences = int(np.sum(np.diff(batch.cu_seqlens) > 0))
        seen.append((sequences, int(batch.positions[0]), last, batch.whole_prompt))
        return inner(packed, between)

    monkeypatch.setattr(runner, "prefill", prefill)
    monkeypatch.setattr(runner, "prefers_whole_prompt", lambda tokens: tokens == 64)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (150, 5, 20, 7)]
    for prompt in prompts[:2]:
        run(engine, [request("alone", prompt, max_tokens=1)])
    run(engine, [request(f"p{n}", p, max_tokens=1) for n, p in enumerate(prompts[2:])])
    run(engine, [request("again", prompts[0][:100] + [7] * 60, max_tokens=1)])
    assert seen[:4] == [(1, 0, 64, True), (1, 64, 64, False), (1, 128, 22, False), (1, 0, 5, True)]
    assert seen[4] == (2, 0, 27, False)
    assert all(start > 0 and not whole for _, start, _, whole in seen[5:])


def test_long_steps_have_closer_buckets() -> None:
    buckets = make_buckets(32768, 32, 512, 64, longest_alone=40000)
    assert buckets.prefill_tokens == (32, 64, 256, 1024, 4096, 8192)
    assert buckets.long_tokens == (16384, 32768)
    assert make_buckets(8192, 32, 512, 64).prefill_tokens == (32, 64, 256, 1024, 4096, 8192)
    assert make_buckets(40, 32, 512, 64).prefill_tokens == (40,)
    assert make_buckets(20000, 32, 512, 64, longest_alone=40000).long_tokens == (16384, 20000)
    assert buckets.prefill_bucket(8193) == 16384
    with pytest.raises(RuntimeError, match="32769"):
        buckets.prefill_bucket(32769)
