"""Suite `retention-load`: conversations in a state memory too small for them, arms side by side.

First one server with memory for every checkpoint says how many the load wants. The arms then share
a budget of a part of that: dense checkpoints, and compressed ones at several cutoffs. All values
are counts of tokens and checkpoints; nothing is timed. The device is waited for after every step:
when a pack is done decides what room there is, and a slow device must not change what is counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jhybrid.engine.build import create_engine
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.engine import Engine
from jhybrid.engine.memory import unit_bytes
from jhybrid.engine.request import Request, SamplingParams

from .results import Result, ResultsFile

SUITE = "retention-load"


@dataclass(frozen=True)
class Load:
    """`turns` rounds over all conversations; every turn adds user tokens and an answer."""

    conversations: int = 64
    turns: int = 4
    user_tokens: tuple[int, int] = (40, 90)  # at least, at most
    answer_tokens: int = 12
    vocab: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Counts:
    """`prompt` tokens were asked, `hit` of them not prefilled; `prefilled` includes replays."""

    prompt: int
    hit: int
    prefilled: int
    resident: int  # checkpoints in any representation when all is done
    resident_compressed: int
    demoted: int
    evicted: int  # checkpoints

    @property
    def hit_rate(self) -> float:
        return self.hit / self.prompt


def drive(engine: Engine, load: Load) -> Counts:
    """Run the load; afterwards the engine is idle, with what it cached."""
    rng = np.random.default_rng(load.seed)
    histories: list[list[int]] = [[] for _ in range(load.conversations)]
    params = SamplingParams(temperature=0, max_tokens=load.answer_tokens, ignore_eos=True)
    prompt = hit = prefilled = 0
    for turn in range(load.turns):
        for number in rng.permutation(load.conversations):
            low, high = load.user_tokens
            new = rng.integers(0, load.vocab, rng.integers(low, high + 1))
            histories[number] += new.tolist()
            name = f"{turn}-{number}"
            engine.add(Request(name, tuple(histories[number]), params))
        while engine.has_work():
            for update in engine.step():
                history = histories[int(update.request_id.split("-")[1])]
                usage = update.prefix_cache
                if usage is not None:
                    prompt += len(history)
                    hit += usage.cached_tokens
                    prefilled += len(history) - usage.cached_tokens + usage.replayed_tokens
                history += update.token_ids
            engine.runner.wait()
    m = engine.metrics()
    compressed = m.pools["compressed_slots"]["tree"]
    return Counts(
        prompt=prompt,
        hit=hit,
        prefilled=prefilled,
        resident=m.pools["native_slots"]["tree"] + compressed,
        resident_compressed=compressed,
        demoted=m.demotions["committed"],
        evicted=m.evictions["native_slots"] + m.evictions["compressed_slots"],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--conversations", type=int, default=Load.conversations, metavar="N")
    parser.add_argument("--turns", type=int, default=Load.turns, metavar="N")
    parser.add_argument(
        "--share", type=float, default=0.2, metavar="X", help="of the checkpoints wanted (0.2)"
    )
    parser.add_argument("--max-running", type=int, default=4, metavar="N")


def arms(base: EngineConfig) -> dict[str, EngineConfig]:
    """Servers that are to share one state memory."""
    found = {"dense": base}
    for w_max in (16, 64):
        found[f"dasc-nr/{w_max}"] = replace(base, recovery="dasc-nr", w_max=w_max)
    found["dasc-wr/64"] = replace(base, recovery="dasc-wr", w_max=64)
    int8 = replace(base, recovery="dasc-nr", w_max=64, checkpoint_dtype="int8")
    return found | {"dasc-nr/64/int8": int8}


def run(args: argparse.Namespace) -> None:
    load, results = Load(conversations=args.conversations, turns=args.turns), ResultsFile(args.out)
    base = EngineConfig(
        max_running=args.max_running,
        max_prefill_tokens=256,
        checkpoint_interval=128,
        max_context=1024,
        dtype="float32",
        kv_memory=2**30,
        state_memory=2**30,
        max_queue=load.conversations,
    )
    engine = create_engine(args.model, base, warm_up=False)
    slot_bytes = unit_bytes(engine.runner.config, base, jnp.dtype("float32"))[1]
    wanted = drive(engine, load)
    if wanted.evicted:
        raise ValueError(f"model: {wanted.evicted} checkpoints of all did not fit in {2**30} bytes")
    budget = int(wanted.resident * args.share) * slot_bytes
    base = replace(base, state_memory=budget)

    rows = {}
    case = f"{engine.model_name.removeprefix('dummy:')}/{load.conversations}x{load.turns}"
    for arm, config in {"all": None, **arms(base)}.items():
        facts: Mapping[str, Any] = {}
        counts = wanted
        if config is not None:
            engine = create_engine(args.model, config, warm_up=False)
            counts, facts = drive(engine, load), engine.info()
        rows[arm] = _values(counts, facts, config)
        for metric, (value, unit) in rows[arm].items():
            results.append(Result(SUITE, case, arm, metric, value, unit, load.conversations))
        print(arm, {metric: value for metric, (value, _) in rows[arm].items()}, flush=True)
    (args.out / "summary.md").write_text(_summary(case, load, budget, slot_bytes, rows))


def _values(
    counts: Counts, facts: Mapping[str, Any], config: EngineConfig | None
) -> dict[str, tuple[float, str]]:
    plan = facts.get("plan") or {}
    int8 = config is not None and config.checkpoint_dtype == "int8"
    capacity = plan.get("checkpoint_int8" if int8 else "checkpoint_ragged", 1.0)
    pools = facts.get("pools", {})
    memory = sum(p["bytes"] for name, p in pools.items() if name != "kv_pages")
    return {
        "token_hit_rate": (counts.hit_rate, "tokens/token"),
        "prefilled_tokens": (counts.prefilled, "tokens"),
        "resident_checkpoints": (counts.resident, "checkpoints"),
        "resident_compressed": (counts.resident_compressed, "checkpoints"),
        "demotions": (counts.demoted, "checkpoints"),
        "evictions": (counts.evicted, "checkpoints"),
        "capacity_ratio": (capacity, "C_ckpt"),
        "state_memory": (memory, "bytes"),
    }


def _summary(
    case: str,
    load: Load,
    budget: int,
    slot_bytes: int,
    rows: Mapping[str, Mapping[str, tuple[float, str]]],
) -> str:
    metrics = list(rows["dense"])
    dense = rows["dense"]["resident_checkpoints"][0]
    slots = budget // slot_bytes
    lines = [
        f"# {SUITE}: {case}",
        "",
        f"{asdict(load)}",
        "",
        f"State memory of every arm but `all`: {budget} bytes, {slots} dense states.",
        "",
        "| arm | " + " | ".join(metrics) + " | resident / (C_ckpt x dense) |",
        "|---" * (len(metrics) + 2) + "|",
    ]
    for arm, values in rows.items():
        cells = [
            f"{value:.4g}" if value != int(value) else f"{int(value)}"
            for value, _ in values.values()
        ]
        share = values["resident_checkpoints"][0] / (values["capacity_ratio"][0] * dense)
        lines.append(f"| {arm} | " + " | ".join(cells) + f" | {share:.3f} |")
    return "\n".join(lines) + "\n"
