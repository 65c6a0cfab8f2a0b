"""python -m jhybrid.plan MODEL --w-max N: what decay-aware checkpoints of a model would save."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..command import run_on_host
from ..config import require
from ..engine.arguments import positive
from ..engine.build import Model, find_model
from ..models.specs import model_specs
from ..params import init_params
from ..retention.horizon import EPSILON, decay_names, is_decay, static_horizons
from ..retention.plan_file import plan_path, save_plan
from ..retention.report import describe, table
from ..retention.selection import select
from ..sharding import make_mesh
from ..weights import is_converted, load_some, named


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jhybrid.plan", description=__doc__)
    out.add_argument(
        "model",
        metavar="MODEL",
        help="converted or Hugging Face checkpoint directory, demo, demo-kda, or dummy:PRESET",
    )
    out.add_argument(
        "--w-max", type=positive, required=True, metavar="N", help="cutoff in tokens, 4 or more"
    )
    out.add_argument(
        "--a-s",
        type=float,
        metavar="X",
        help="gate input that horizons are computed at (default: -0.3 softplus, 0.8 safe gate)",
    )
    out.add_argument(
        "--epsilon", type=float, default=EPSILON, metavar="E", help="what is left at a horizon"
    )
    out.add_argument("--tp", type=positive, default=1, metavar="P", help="ranks to place it over")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    out.add_argument("--plots", type=Path, metavar="DIR", help="write figures here (matplotlib)")
    out.add_argument(
        "--save", action="store_true", help="keep the plan beside converted weights, for serving"
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the table is printed; 2 with one message on stderr when the input is not usable."""
    return run_on_host(_plan, parser().parse_args(argv))


def _plan(args: argparse.Namespace) -> None:
    model = find_model(args.model)
    config, folder = model.config, model.folder
    sizes = [n for n in config.tensor_parallel_sizes() if config.linear.key_heads % n == 0]
    require(args.tp in sizes, "tp", args.tp, f"one of {sizes}, which divide this model")
    horizons = static_horizons(
        decay_parameters(model), config, gate_input=args.a_s, epsilon=args.epsilon
    )
    plan = select(horizons, args.w_max)
    found = {"model": model.name, **describe(plan, config, args.tp)}
    print(f"{model.name}\n{table(found)}")
    if args.save:
        converted = folder is not None and is_converted(folder)
        require(converted, "--save", args.model, "a folder written by jhybrid.convert")
        assert folder is not None
        save_plan(plan, plan_path(folder, args.w_max))
        print(f"saved {plan_path(folder, args.w_max)}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    if args.plots is not None:
        from .plots import write_plots  # matplotlib is an extra

        for path in write_plots(plan, config, model.name, args.plots):
            print(f"wrote {path}")


def decay_parameters(model: Model) -> Mapping[str, Any]:
    """The decay parameters by name; no other parameter is read or made."""
    if model.folder is not None:
        return load_some(model.folder, model.config, decay_names(model.config))
    specs, mesh = model_specs(model.config), make_mesh(1)
    return named(init_params(specs, jax.random.key(0), "bfloat16", mesh, wanted=is_decay))


if __name__ == "__main__":
    sys.exit(main())
