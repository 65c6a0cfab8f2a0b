"""The warmup-replay protocol of dasc appendix C, shared by all quality suites.

A block of problems at a time: flush; one unscored warm request for every distinct prefix, run
without the cache so that what it leaves is exact; the arm's intervention, if it has one; then R
measured replays of every problem, all of whose outputs count, hit or miss. Arms share token ids,
order, seeds and slots, so they are paired. The problem is the statistical unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from jhybrid.config import require
from jhybrid.engine.llm import LLM
from jhybrid.engine.request import PrefixCacheOptions, PrefixCacheUsage, SamplingParams

from .arms import Arm
from .interventions import intervention
from .probes import PARAMS as PROBE_PARAMS
from .probes import probe_record
from .scoring import score
from .store import Record, Store, digest
from .tasks.problem import Problem
from .weights import moments

WARM = PrefixCacheOptions(recovery="off")  # reads nothing from the cache, and fills it
WARM_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Residency:
    """What a controlled run demands: of a block before and after its replays, and of an arm."""

    free_slots: int = 272
    token_hit: float = 0.70
    loaded: float = 0.95
    loaded_arm: float = 0.99


@dataclass(frozen=True)
class Protocol:
    """`block` problems are warmed together; None takes as many as the pools surely hold.

    `probe`: also measure suffix KL and answer likelihood. `residency` None demands nothing, and the
    same figures are reported.
    """

    replays: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    block: int | None = None
    probe: bool = True
    residency: Residency | None = None

    def params(self, problem: Problem, replay: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=problem.seed(self.seed, replay),
            max_tokens=problem.max_tokens,
            stop=problem.stop,
        )


@dataclass
class ArmRun:
    """One arm over all problems: what is missing in the stores is generated.

    `settings` are of the run: model, common flags. `outputs` and `probes` are append-only.
    """

    llm: LLM
    arm: Arm
    suite: str
    protocol: Protocol
    outputs: Store
    probes: Store
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        kept: dict[str, Any] = {"weights": moments(self.llm.engine.runner.params)}
        kept |= asdict(self.protocol)
        for name in ("block", "probe", "residency"):  # they do not change an answer
            del kept[name]
        self._digest = digest({**self.settings, **kept, "flags": self.arm.flags})
        self._options = PrefixCacheOptions(self.arm.recovery, self.arm.replay_ratio)
        name = self.arm.intervention
        self._intervene = intervention(self.llm.engine, name) if name is not None else None

    def key(self, problem: Problem, replay: int | None) -> str:
        """Of one replay, or of the probe."""
        parts = (self.suite, self._digest, self.arm.name, problem.case, problem.id, problem.digest)
        return "/".join((*parts, "probe" if replay is None else str(replay)))

    def run(self, problems: Sequence[Problem]) -> None:
        """Fill the stores, the longest problems first."""
        ordered = sorted(problems, key=lambda p: (-len(p.prompt), p.case, p.id))
        total = len(problems) * self.protocol.replays
        with tqdm(total=total, desc=f"{self.suite} {self.arm.name}", unit="answer") as bar:
            done = sum(self.key(p, r) in self.outputs for p in problems for r in self._replays())
            bar.update(done)
            for block in self._blocks([p for p in ordered if self._missing(p)]):
                self._run_block(block, bar)
        if self.protocol.residency is not None:
            loaded = [self.outputs[self.key(p, r)] for p in problems for r in self._replays()]
            share = sum(record["restored"] > 0 for record in loaded) / len(loaded)
            least = self.protocol.residency.loaded_arm
            require(share >= least, f"{self.arm.name}: loaded requests", share, f"at least {least}")

    def records(self, problem: Problem) -> list[Record]:
        return [self.outputs[self.key(problem, r)] for r in self._replays()]

    def probe(self, problem: Problem) -> Record | None:
        key = self.key(problem, None)
        return self.probes[key] if key in self.probes else None

    def _replays(self) -> range:
        return range(1, self.protocol.replays + 1)

    def _missing(self, problem: Problem) -> bool:
        probed = not self.protocol.probe or not self._lacks(problem, None)
        return not probed or any(self._lacks(problem, replay) for replay in self._replays())

    def _blocks(self, problems: list[Problem]) -> Iterator[list[Problem]]:
        """Cut so that all prefixes of a block stay cached through its replays.

        A prefix takes its checkpoints (at its end, one short of it, and on the grid) and its pages;
        each problem behind it at most three more checkpoints and its own pages.
        """
        engine = self.llm.engine
        pools = engine.metrics().pools
        slots = sum(pools["compressed_slots"].values())
        if not slots:  # checkpoints share the native slots with what runs
            slots = sum(pools["native_slots"].values()) - engine.config.max_running
        pages = sum(pools["kv_pages"].values())
        size, interval = engine.config.page_size, engine.config.checkpoint_interval
        block: list[Problem] = []
        prefixes: set[tuple[int, ...]] = set()
        used_slots = used_pages = 0
        for problem in problems:
            new = problem.prefix not in prefixes
            own = len(problem.prompt) + problem.max_tokens - problem.boundary
            need_slots = 3 + (2 + problem.boundary // interval if new else 0)
            need_pages = own // size + 2 + (problem.boundary // size + 1 if new else 0)
            full = used_slots + need_slots > slots or used_pages + need_pages > pages
            if block and (
                full if self.protocol.block is None else len(block) == self.protocol.block
            ):
                yield block
                block, prefixes, used_slots, used_pages = [], set(), 0, 0
            block.append(problem)
            prefixes.add(problem.prefix)
            used_slots, used_pages = used_slots + need_slots, used_pages + need_pages
        if block:
            yield block

    def _run_block(self, block: list[Problem], bar: tqdm) -> None:
        """Probes first, then the replays in rounds.

        Where a prefix ends before its prompt does, a round leaves more cached than it found, and
        the next would hit deeper: then the cache is filled anew for every round.
        """
        refill = any(p.boundary < len(p.prompt) - 1 for p in block)
        filled, evicted = False, 0
        rounds = [None, *self._replays()] if self.protocol.probe else list(self._replays())
        for replay in rounds:
            todo = [p for p in block if self._lacks(p, replay)]
            if not todo:
                continue
            if refill or not filled:
                self._fill(block)
                filled = True
            if replay is None:
                self._probe(todo)
                continue
            before = self._evictions()
            self._replay(todo, replay, bar)
            evicted += self._evictions() - before
        if self.protocol.residency is not None:
            records = [record for p in block for record in self.records(p)]
            self._check(self.protocol.residency, records, evicted)

    def _lacks(self, problem: Problem, replay: int | None) -> bool:
        if replay is None:
            return bool(problem.answer_ids) and self.probe(problem) is None
        return self.key(problem, replay) not in self.outputs

    def _evictions(self) -> int:
        return sum(self.llm.engine.metrics().evictions.values())

    def _fill(self, block: list[Problem]) -> None:
        """Flush, warm every prefix, intervene, and see that all is where it must be."""
        engine, residency = self.llm.engine, self.protocol.residency
        require(engine.flush_cache(), "engine", "running", "idle before a block")
        prefixes = list(dict.fromkeys(p.prefix for p in block if p.prefix))
        for _ in self.llm.stream(prefixes, [WARM_PARAMS] * len(prefixes), prefix_cache=WARM):
            pass
        if self._intervene is not None:
            self._intervene()
        pools = engine.metrics().pools
        pool = "compressed_slots" if sum(pools["compressed_slots"].values()) else "native_slots"
        if pool == "compressed_slots":  # a hit must not get around the compression
            dense = pools["native_slots"]["tree"]
            require(dense == 0, f"{self.arm.name}: dense checkpoints", dense, "none in a block")
        if residency is not None:
            free, least = pools[pool]["free"], residency.free_slots
            require(free >= least, f"{self.arm.name}: free slots", free, f"at least {least}")

    def _probe(self, problems: list[Problem]) -> None:
        prompts = [(*p.prompt, *p.answer_ids) for p in problems]
        params = [PROBE_PARAMS] * len(problems)
        for n, output in self.llm.stream(prompts, params, prefix_cache=self._options):
            assert output.prompt_logprobs is not None
            record = probe_record(problems[n], output.prompt_logprobs)
            self.probes.append(self.key(problems[n], None), record)

    def _replay(self, problems: list[Problem], replay: int, bar: tqdm) -> None:
        prompts = [p.prompt for p in problems]
        params = [self.protocol.params(p, replay) for p in problems]
        for n, output in self.llm.stream(prompts, params, prefix_cache=self._options):
            text, problem = output.outputs[0], problems[n]
            record = {
                "suite": self.suite,
                "arm": self.arm.name,
                "case": problem.case,
                "problem": problem.id,
                "replay": replay,
                "text": text.text,
                "tokens": len(text.token_ids),
                "finish": text.finish_reason,
                "score": score(problem.scorer, text.text, problem.references, problem.tags),
                "asked": self.arm.recovery,
                **_cache_use(output.prefix_cache, len(problem.prompt)),
            }
            self.outputs.append(self.key(problem, replay), record)
            bar.update()

    def _check(self, residency: Residency, records: list[Record], evicted: int) -> None:
        name = self.arm.name
        require(evicted == 0, f"{name}: evictions in a block's replays", evicted, "none")
        hit = pooled_hit(records)
        require(hit > residency.token_hit, f"{name}: hit", hit, f"above {residency.token_hit}")
        share = sum(record["restored"] > 0 for record in records) / len(records)
        least = residency.loaded
        require(share >= least, f"{name}: loaded requests", share, f"at least {least}")


def _cache_use(usage: PrefixCacheUsage | None, prompt: int) -> dict[str, Any]:
    usage = usage or PrefixCacheUsage("off")
    return {
        "cached": usage.cached_tokens,
        "new": prompt - usage.cached_tokens,
        "matched": usage.matched_tokens,
        "restored": usage.restored_tokens,
        "replayed": usage.replayed_tokens,
        "recovery": usage.recovery,
        "reason": usage.reason,
    }


def pooled_hit(records: Sequence[Record]) -> float:
    """H = sum C / sum (C + N) over measured replays."""
    cached, new = (sum(record[name] for record in records) for name in ("cached", "new"))
    return cached / (cached + new) if cached + new else 0.0
