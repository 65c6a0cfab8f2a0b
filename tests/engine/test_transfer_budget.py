"""What is on its way from host memory stays within its budget, and all of it arrives."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jhybrid.engine.config import EngineConfig
from jhybrid.engine.engine import Engine
from jhybrid.engine.host_moves import ROW_SIZES
from jhybrid.engine.memory import unit_bytes
from jhybrid.engine.request import PrefixCacheOptions
from jhybrid.models.pages import KV, PageKind

from .tiny import TINY, assert_greedy, assert_idle, request, run, tiny_engine


class InFlight:
    """Bytes that an engine has sent from host memory and not put yet, now and at most."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.sent = self.largest = 0
        runner = engine.runner
        to_device, put_pages = runner.to_device, runner.put_pages

        def transferred(kind: PageKind, chunks: list[Any]) -> Any:
            sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(chunk)) for chunk in chunks]
            self.now, self.sent = self.now + sum(sizes), self.sent + sum(sizes)
            self.most, self.largest = max(self.most, self.now), max(self.largest, *sizes)
            return to_device(kind, chunks)

        def put(kind: PageKind, pages: Any, rows: list[Any]) -> None:
            self.now -= sum(leaf.nbytes for leaf in jax.tree.leaves(rows))
            put_pages(kind, pages, rows)

        monkeypatch.setattr(runner, "to_device", transferred)
        monkeypatch.setattr(runner, "put_pages", put)


@pytest.mark.parametrize("talks", [False, True])
@pytest.mark.parametrize("recovery", ["tail-replay", "anchored", "dense"])
@pytest.mark.parametrize("chunks", [0, 5])
def test_what_several_hits_bring_is_never_more_than_the_budget(
    chunks: int, recovery: Any, talks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: Any = {"recovery": "tail-replay", "host_memory": 2**22}
    size = ROW_SIZES["lower-kv"][0] * unit_bytes(TINY, tiny_engine(**flags).config, np.float32)[0]
    engine = tiny_engine(**flags, transfers=chunks * size)
    assert engine.cache.pools.host is not None
    engine.cache.pools.host.chunk_rows = ROW_SIZES["lower-kv"][0]
    rng = np.random.default_rng(7)
    trunks = [rng.integers(0, 256, 200 + 13 * n).tolist() for n in range(3)]
    run(engine, [request(f"trunk {n}", trunk) for n, trunk in enumerate(trunks)])
    engine.cache.offload()
    engine.host.offload()
    seen = InFlight(engine, monkeypatch)
    if talks:
        engine.add(request("talking", [9, 8, 7], max_tokens=60))
        engine.step()
    options = PrefixCacheOptions(recovery, 1.0)
    hits = {
        str(n): request(str(n), [*trunk, n], max_tokens=4, prefix_cache=options)
        for n, trunk in enumerate(trunks)
    }
    answers = dict[str, list[int]]()
    for hit in hits.values():
        engine.add(hit)
    while engine.has_work():
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.token_ids)
            if update.request_id in hits and update.prefix_cache is not None:
                matched = update.prefix_cache.matched_tokens
                assert matched == len(trunks[int(update.request_id)])
        engine.cache.check_integrity()
    for name, hit in hits.items():
        assert_greedy(list(hit.prompt_token_ids), answers[name])
    assert len(answers.get("talking", ())) == 60 * talks
    assert seen.now == 0 < seen.most <= max(chunks * size, seen.largest)
    assert seen.sent > 9 * size
    assert_idle(engine)


@pytest.mark.parametrize(("chunks", "steps"), [(5, 3), (8, 1)])
def test_a_large_state_is_sent_beside_a_call_that_is_partly_sent(
    chunks: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has room beside the other in the budget, and the call cannot be put yet."""
    rows = ROW_SIZES["lower-kv"][0]
    for kind in KV:
        monkeypatch.setitem(ROW_SIZES, kind, (rows,))
    flags: Any = {"recovery": "tail-replay", "host_memory": 2**22, "page_size": 1}
    page, state, _ = unit_bytes(TINY, EngineConfig(**flags), np.float32)
    budget = chunks * rows * page // 2  # one of two full-attention layers is an upper one
    engine = tiny_engine(**flags, transfers=budget)
    assert engine.cache.pools.host is not None and state > budget // 2
    engine.cache.pools.host.chunk_rows = rows
    rng = np.random.default_rng(8)
    trunks = [rng.integers(0, 256, 100).tolist() for _ in range(2)]
    run(engine, [request(f"trunk {n}", trunk) for n, trunk in enumerate(trunks)])
    engine.cache.offload()
    engine.host.offload()
    engine.add(request("talking", [9, 8, 7], max_tokens=60))
    for _ in range(3):
        engine.step()
    seen = InFlight(engine, monkeypatch)
    hits = {str(n): [*trunk, n] for n, trunk in enumerate(trunks)}
    answers = dict[str, list[int]]()
    for name, prompt in hits.items():
        options = PrefixCacheOptions("dense")
        engine.add(request(name, prompt, max_tokens=4, prefix_cache=options))
        for _ in range(steps):
            for update in engine.step():
                answers.setdefault(update.request_id, []).extend(update.token_ids)
    while engine.has_work():
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.token_ids)
    for name, prompt in hits.items():
        assert_greedy(prompt, answers[name])
    assert seen.now == 0 < seen.most <= max(budget, seen.largest)
    assert_idle(engine)
