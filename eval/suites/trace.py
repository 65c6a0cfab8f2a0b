"""Suite `trace`: serving under load, arms under one state-memory budget, or any OpenAI server.

Without --base-url a server of this project is started for every arm and server limit. With it, that
server is measured as it is, under the name of the one arm given.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jhybrid.config import require
from jhybrid.engine.arguments import add_engine_arguments, positive
from jhybrid.engine.build import find_model
from jhybrid.engine.config import EngineConfig

from ..arms import Arm
from ..flags import arm_list, counts, integers
from ..report import write_report
from ..results import Result, ResultsFile
from ..scoring.statistics import mean_and_sample_sd
from ..store import Store, digest
from ..trace import client, server, shape

log = logging.getLogger(__name__)

DEFAULT_ARMS = "dense,dasc-nr/64,dasc-wr/64,tail-replay/0.05,anchored/64"
UNITS = {"hit": "ratio", "requests_failed": "request", "generated": "token"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    default = shape.Shape()
    group = parser.add_argument_group("suite")
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="also resumes from it"
    )
    group.add_argument("--arms", type=arm_list, default=DEFAULT_ARMS, metavar="ARM,...")
    group.add_argument(
        "--limits", type=counts, default="32", metavar="N,...", help="--max-running of the server"
    )
    group.add_argument("--concurrency", type=positive, default=256, help="requests at once")
    group.add_argument(
        "--seeds", type=integers, default="0,1,2,3,4", metavar="N,...", help="of arrival order"
    )
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--log", type=Path, metavar="JSONL", help="conversations; else generated")
    group.add_argument("--conversations", type=positive, default=default.conversations)
    group.add_argument("--turns", type=positive, default=default.turns)
    group.add_argument("--scale", type=float, default=1.0, help="of all lengths, for small models")
    group.add_argument("--trace-seed", type=int, default=0, help="of a generated trace")
    peer = parser.add_argument_group("another server")
    peer.add_argument("--base-url", metavar="URL", help="http://HOST:PORT of a running server")
    peer.add_argument("--api-key")
    peer.add_argument("--served-model", metavar="NAME", help="(default: the first it lists)")
    peer.add_argument("--tokenizer", type=Path, metavar="DIR", help="(default: MODEL's)")


def run(args: argparse.Namespace) -> None:
    arms: list[Arm] = args.arms
    for arm in arms:
        served = arm.intervention is None or args.base_url is not None
        require(served, "arm", arm.name, "an arm that a server can run")
    one = args.base_url is None or len(arms) == 1
    require(one, "arms", [arm.name for arm in arms], "one name for the server at --base-url")
    trace = _trace(args)
    shape.check(trace, args.max_context)
    print(f"trace {shape.digest(trace)}: {sum(map(len, trace))} requests, longest context "
          f"{shape.largest_context(trace)} tokens", flush=True)  # fmt: skip
    results, store = ResultsFile(args.out), Store(args.out, "trace")
    for limit in args.limits:
        for arm in arms:
            _measure(args, arm, limit, trace, results, store)
    write_report(args.out)


def _trace(args: argparse.Namespace) -> list[shape.Conversation]:
    from transformers import AutoTokenizer

    folder = args.tokenizer or find_model(args.model).tokenizer_folder
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    wanted = shape.Shape(args.conversations, args.turns, scale=args.scale)
    if args.log is not None:
        return shape.from_log(args.log, wanted, tokenizer)
    return shape.generated(wanted, shape.plain_ids(tokenizer), args.trace_seed)


def _measure(
    args: argparse.Namespace,
    arm: Arm,
    limit: int,
    trace: Sequence[shape.Conversation],
    results: ResultsFile,
    store: Store,
) -> None:
    """All seeds of one arm at one server limit; those in the store are not run again."""
    flags = _server_flags(args, arm, limit)
    settings = {
        "trace": shape.digest(trace),
        "model": args.model,
        "flags": flags,
        "url": args.base_url,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
    }
    keys = {s: f"trace/{digest(settings)}/{arm.name}/{limit}/{s}" for s in args.seeds}
    missing = [seed for seed in args.seeds if keys[seed] not in store]
    if missing:
        errors = args.out / f"server-{arm.name.replace('/', '-')}-{limit}.log"
        with _server(args, flags, errors) as url:
            for seed in missing:
                if not server.flush(url, args.api_key):
                    log.warning(
                        "%s: the cache could not be emptied; seed %d finds what is in it", url, seed
                    )
                answers = _send(args, url, trace, seed, f"trace {arm.name} x{limit} seed {seed}")
                record = {
                    "capacity": server.capacity(url, args.api_key),
                    **client.statistics(answers),
                    "answers": client.as_records(answers),
                }
                store.append(keys[seed], record)
    found = [store[keys[seed]] for seed in args.seeds]
    case = f"concurrency-{args.concurrency}/limit-{limit}"
    names = [n for n in found[0] if n not in ("key", "answers") and found[0][n] is not None]
    for name in names:
        mean, sd = mean_and_sample_sd([record[name] for record in found])
        unit = UNITS.get(name, "slot" if name == "capacity" else "s")
        results.append(Result("trace", case, arm.name, name, mean, unit, len(found)))
        results.append(Result("trace", case, arm.name, f"{name}_sd", sd, unit, len(found)))


def _server_flags(args: argparse.Namespace, arm: Arm, limit: int) -> dict[str, Any]:
    """What was given on the command line, then the arm's."""
    given = {f.name: getattr(args, f.name, None) for f in fields(EngineConfig)}
    flags = {name: value for name, value in given.items() if value is not None}
    flags |= {"max_running": limit, "recovery": arm.recovery, **arm.flags}
    flags["max_queue"] = max(flags.get("max_queue", 0), args.concurrency)
    if arm.replay_ratio is not None:
        flags["replay_ratio"] = arm.replay_ratio
    return flags


@contextmanager
def _server(args: argparse.Namespace, flags: dict[str, Any], log: Path) -> Iterator[str]:
    if args.base_url is not None:
        yield args.base_url.rstrip("/").removesuffix("/v1")
        return
    with server.serving(args.model, flags, log) as url:
        yield url


def _send(
    args: argparse.Namespace, url: str, trace: Sequence[shape.Conversation], seed: int, name: str
) -> list[client.Answer]:
    target = client.Target(f"{url}/v1", args.served_model, args.api_key)
    with tqdm(total=sum(map(len, trace)), desc=name, unit="request") as bar:

        def on_answer(_: client.Answer) -> None:
            bar.update()

        return asyncio.run(
            client.send_trace(
                target,
                trace,
                concurrency=args.concurrency,
                seed=seed,
                temperature=args.temperature,
                on_answer=on_answer,
            )
        )
