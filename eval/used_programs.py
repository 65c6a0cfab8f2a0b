"""Which of an engine's programs a batch of fresh prompts runs, so that only those are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jhybrid.engine.buckets import Buckets, bucket
from jhybrid.engine.model_runner import ModelRunner
from jhybrid.engine.programs import PREFILL, Shape
from jhybrid.engine.sampler import SampleMode
from jhybrid.engine.warm_up import warm_up

Program = tuple[str, Shape]


def compile_used(runner: ModelRunner, batches: Iterable[tuple[int, int]]) -> None:
    """Compile side by side what takes long, for batches of so many prompts of so many tokens that
    arrive together and are answered greedily; all else is compiled when it first runs."""
    used = {program for batch in batches for program in used_programs(runner, *batch)}
    for _ in warm_up(runner, lambda name, size: (name, size) in used):
        pass


def used_programs(runner: ModelRunner, prompts: int, length: int) -> set[Program]:
    """Of `prompts` sequences, prefilled as the scheduler packs them and decoded as they are."""
    b, found, running = runner.buckets, set[Program](), 0
    for tokens, pieces, fresh, done in _prefill_steps(prompts, length, b):
        size, sequences = b.prefill_bucket(tokens), bucket(b.prefill_sequences, pieces)
        whole = pieces == 1 and fresh and runner.prefers_whole_prompt(size)
        running += done
        decode = bucket(b.decode, max(1, running))
        found |= {(name, (size, sequences, int(whole))) for name in PREFILL}
        found |= {(name, (decode,)) for name in ("decode", "set_lines", "add_pages")}
        found |= {(f"draw-{SampleMode.GREEDY.name}", (n,)) for n in (sequences, decode)}
    return found


def _prefill_steps(
    prompts: int, length: int, buckets: Buckets
) -> Iterator[tuple[int, int, bool, int]]:
    """Tokens and prompts of each step, whether it begins a prompt, and how many it ends."""
    left, most = [length] * prompts, buckets.all_prefill_tokens[-1]
    while left:
        fresh, before, pieces = left[0] == length, len(left), 0
        waiting = list[tuple[int, bool]]()
        for tokens in left[: buckets.prefill_sequences[-1]]:
            waiting.append((min(tokens, most), tokens == length))
            if buckets.is_full(waiting):
                break
        tokens = budget = min(most, buckets.prefill_step(waiting))
        while left and budget:
            size = min(budget, left[0])
            budget, pieces, left[0] = budget - size, pieces + 1, left[0] - size
            if not left[0]:
                left.pop(0)
        yield tokens, pieces, fresh, before - len(left)
