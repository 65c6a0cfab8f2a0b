"""Compressed checkpoints under load: more of them, and more hits, in the memory of dense ones."""

from __future__ import annotations

from jhybrid.engine.config import EngineConfig
from jhybrid.engine.memory import split_states
from jhybrid.eval.retention_load import Counts, Load, drive
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.selection import select

from .tiny import TINY, assert_idle, tiny_engine, tiny_params

LOAD = Load(conversations=24, turns=3, user_tokens=(20, 40), answer_tokens=6)
DENSE_SLOTS = 120


def test_the_same_memory_holds_more_compressed_checkpoints() -> None:
    w_max = 4096  # long, as these random weights remember long
    plan = select(static_horizons(tiny_params(), TINY), w_max)
    dense = tiny_engine(slots=DENSE_SLOTS, pages=1200, max_running=2)
    expected = drive(dense, LOAD)
    assert_idle(dense)
    assert expected.evicted > 0 and expected.resident == DENSE_SLOTS
    assert expected.prefilled == expected.prompt - expected.hit

    slot_bytes = dense.runner.pool_bytes()["native_slots"] // DENSE_SLOTS
    flags = {"recovery": "dasc-nr", "w_max": w_max, "max_running": 2}
    probe = tiny_engine(plan=plan, **flags)
    assert probe.runner.compression is not None
    compressed_bytes = probe.runner.compression.slot_bytes
    scratch = probe.runner.compression.scratch_bytes
    config = EngineConfig(**flags, max_prefill_tokens=64, checkpoint_interval=32)
    sizes = split_states(
        config, DENSE_SLOTS * slot_bytes, slot_bytes, compressed_bytes, scratch, 1200
    )
    found: dict[str, Counts] = {}
    for recovery in ("dasc-nr", "dasc-wr"):
        engine = tiny_engine(
            plan=plan,
            pages=1200,
            slots=sizes.native_slots,
            compressed_slots=sizes.compressed_slots,
            watermark=sizes.watermark,
            own_programs=True,  # what its pools take is measured
            **{**flags, "recovery": recovery},
        )
        found[recovery] = drive(engine, LOAD)
        assert_idle(engine)
        memory = engine.runner.pool_bytes()
        used = memory["native_slots"] + memory["compressed_slots"] + scratch
        assert used <= DENSE_SLOTS * slot_bytes

    capacity = slot_bytes / compressed_bytes
    assert capacity > 1.3
    for counts in found.values():
        assert counts.resident >= 0.9 * capacity * expected.resident
        assert counts.resident_compressed == sizes.compressed_slots
        assert counts.hit > expected.hit and counts.demoted > 50
    assert found["dasc-nr"].prefilled < expected.prefilled
    refreshed = found["dasc-wr"]
    assert refreshed.prefilled > refreshed.prompt - refreshed.hit  # replays count
