"""Suite `horizons`: do horizons from weights rank units as real text does (dasc Table 1b)?

For every prefix and linear layer the Spearman correlation over units of the static horizon with the
empirical one, and with the state's magnitude at the end; then median and quartiles over pairs.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jhybrid.engine.arguments import add_engine_arguments, positive
from jhybrid.engine.build import LoadedModel, engine_config, load_model, warn_unread
from jhybrid.engine.config import EngineConfig
from jhybrid.retention.horizon import static_horizons
from jhybrid.retention.observed import correlations, observe
from jhybrid.retention.selection import select

from ..flags import counts
from ..report import write_report
from ..results import Result, ResultsFile
from ..scoring.statistics import median_and_iqr
from ..tasks.prefixes import essays, sharegpt
from ..tasks.problem import Encoder

SOURCES = {"sharegpt": sharegpt, "essays": essays}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    group = parser.add_argument_group("suite")
    group.add_argument("--out", type=Path, required=True, metavar="DIR")
    group.add_argument("--data", type=Path, metavar="DIR", help="where files not shipped are")
    group.add_argument("--prefixes", choices=SOURCES, default="sharegpt")
    group.add_argument("--lengths", type=counts, default="16384,8192,4096,1024", metavar="N,...")
    group.add_argument("--samples", type=positive, default=8, metavar="N", help="of each length")
    group.add_argument("--window", type=positive, default=64, metavar="N", help="w_max of figures")


def run(args: argparse.Namespace) -> None:
    warn_unread(args, ("tp", "dtype", "a_s", "compilation_cache"))
    engine = engine_config(args)
    model = load_model(args.model, engine)
    encoder, results = Encoder(model.tokenizer), ResultsFile(args.out)
    measure_horizons(
        model, engine, encoder, args.data, args.prefixes, args.lengths, args.samples, results
    )
    draw_horizons(model, engine, args.window, args.out)
    write_report(args.out)


def draw_horizons(model: LoadedModel, engine: EngineConfig, window: int, out: Path) -> None:
    """Figures of the units, and of what w_max `window` keeps, where matplotlib is there."""
    if importlib.util.find_spec("matplotlib"):
        from jhybrid.plan.plots import write_plots

        horizons = static_horizons(model.params, model.config, gate_input=engine.a_s)
        write_plots(select(horizons, window), model.config, model.name, out)


def measure_horizons(
    model: LoadedModel,
    engine: EngineConfig,
    encoder: Encoder,
    data: Path | None,
    source: str,
    targets: Sequence[int],
    count: int,
    results: ResultsFile,
) -> None:
    """Append the correlations on `count` prefixes of each target length."""
    prefixes = SOURCES[source](data, encoder, targets, count)
    horizons = static_horizons(model.params, model.config, gate_input=engine.a_s)
    pairs: dict[str, list[float]] = {"H_s, H_e": [], "H_s, M_S": []}
    for prefix in tqdm(prefixes, desc="horizons", unit="prefix"):
        seen = observe(model.params, model.config, model.mesh, prefix, model.dtype)
        empirical = seen.horizons(horizons.epsilon)
        pairs["H_s, H_e"] += correlations(horizons.values, empirical).tolist()
        pairs["H_s, M_S"] += correlations(horizons.values, seen.magnitude).tolist()
    for pair, values in pairs.items():
        middle, low, high = median_and_iqr(values)
        n = int(np.count_nonzero(~np.isnan(values)))
        for metric, value in (("median", middle), ("quartile_1", low), ("quartile_3", high)):
            results.append(
                Result("horizons", model.name, pair, metric, value, "rank correlation", n)
            )
