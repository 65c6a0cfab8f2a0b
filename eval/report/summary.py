"""summary.md: one section a suite, in the manner of the papers' tables, with where it came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .frame import Frame, Record, frames, number, table, with_error

PROVENANCE = ("commit", "device", "command", "versions")


def summary(records: Sequence[Record], figures: Sequence[str] = ()) -> str:
    parts = ["# Results", _provenance(records)]
    for frame in frames(records):
        section = _SECTIONS.get(frame.suite, _by_case)
        parts += [f"## {frame.suite}", section(frame)]
    parts += [f"![{name}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _provenance(records: Sequence[Record]) -> str:
    lines = []
    for name in PROVENANCE:
        for value in dict.fromkeys(_text(r[name]) for r in records):
            lines.append(f"* {name}: {value}")
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return f"`{value}`"


def _by_case(frame: Frame) -> str:
    """dasc Table 2: a row a case with the hit pooled over its arms, a column an arm."""
    head = ["case", "N", "hit", *frame.arms]
    rows = []
    for case in frame.cases:
        hits = [frame.value(case, arm, "hit") for arm in frame.arms]
        known = [hit for hit in hits if hit is not None]
        hit = sum(known) / len(known) if known else None
        cells = [_score(frame, case, arm) for arm in frame.arms]
        n = max(frame.count(case, arm, "score") for arm in frame.arms)
        rows.append([case, str(n), number(hit, 4), *cells])
    parts = [table(head, rows), SCORE_NOTE]
    return "\n\n".join([*parts, *_finer(frame)])


SCORE_NOTE = (
    "Mean over problems ± standard error (over masks: mean ± sample SD); hit is pooled over "
    "measured replays."
)


def _score(frame: Frame, case: str, arm: str) -> str:
    sd = frame.value(case, arm, "score_sd")
    error = sd if sd is not None else frame.value(case, arm, "score_se")
    return with_error(frame.value(case, arm, "score"), error)


def _finer(frame: Frame) -> list[str]:
    """Differences to dense, suffix KL and answer likelihood, where they were measured."""
    rows = []
    for case in frame.cases:
        for arm in frame.arms:
            delta = frame.value(case, arm, "score_delta")
            kl, nll = frame.value(case, arm, "kl"), frame.value(case, arm, "nll")
            if arm not in ("dense", "baseline") and (delta is not None or kl is not None):
                low = frame.value(case, arm, "score_delta_low")
                high = frame.value(case, arm, "score_delta_high")
                bounds = f"[{number(low)}, {number(high)}]" if low is not None else "-"
                change = with_error(delta, frame.value(case, arm, "score_delta_se"))
                error = frame.value(case, arm, "kl_se") or frame.value(case, arm, "kl_sd")
                kl_text = with_error(kl, error, 4)
                nll_text = number(frame.value(case, arm, "nll_delta"), 4)
                replayed = number(frame.value(case, arm, "replayed"), 0)
                row = [case, arm, change, bounds, kl_text, number(nll, 4), nll_text, replayed]
                rows.append(row)
    if not rows:
        return []
    head = ["case", "arm", "score - dense", "95 %", "KL(dense ‖ arm)", "NLL", "NLL - dense"]
    note = (
        "Paired by problem; bootstrap over problems. KL in nats a suffix token, NLL in nats a "
        "token of the answer; `replayed` is the mean number of replayed tokens a request."
    )
    return [table([*head, "replayed"], rows), note]


def _ruler(frame: Frame) -> str:
    """dasc Tables 5 and 6: a row an arm and length, a column a subtask, and their mean."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)  # length -> task -> case
    for case in frame.cases:
        task, _, length = case.partition("/")
        cells[length][task] = case
    tasks = list(dict.fromkeys(task for found in cells.values() for task in found))
    rows = []
    for arm in frame.arms:
        for length, found in cells.items():
            values = [frame.value(found[t], arm, "score") if t in found else None for t in tasks]
            mean = frame.mean(list(found.values()), arm, "score")
            rows.append([arm, length, *(number(v, 2) for v in values), number(mean, 2)])
    parts = [table(["arm", "length", *tasks, "Avg"], rows)]
    counts = {frame.count(case, frame.arms[0], "score") for case in frame.cases}
    parts.append(f"Score; N = {', '.join(map(str, sorted(counts)))} problems a cell.")
    return "\n\n".join([*parts, *_grids(frame, cells, tasks)])


FINER = (
    ("kl", "KL(dense ‖ arm), nats a suffix token"),
    ("nll_delta", "NLL - dense, nats a token of the answer"),
    ("score_delta_se", "standard error of score - dense, paired by problem"),
    ("replayed", "replayed tokens a request"),
)


def _grids(frame: Frame, cells: dict[str, dict[str, str]], tasks: list[str]) -> list[str]:
    """What is finer than a score, each in a table of the same form."""
    parts = []
    for metric, title in FINER:
        rows = []
        for arm in frame.arms:
            for length, found in cells.items():
                values = [frame.value(found[t], arm, metric) if t in found else None for t in tasks]
                if any(v is not None for v in values):
                    digits = 0 if metric == "replayed" else 4
                    rows.append([arm, length, *(number(v, digits) for v in values)])
        if rows:
            parts += [f"### {title}", table(["arm", "length", *tasks], rows)]
    return parts


def _intervention(frame: Frame) -> str:
    """dasc Table 1a: a row an intervention, a column a case."""
    head = ["intervention", *frame.cases]
    rows = [[arm, *(_score(frame, case, arm) for case in frame.cases)] for arm in frame.arms]
    note = (
        "zero-linear zeroes recurrent states and conv windows of the cached prefix; zero-full-kv "
        "writes zeros into its keys and values (a zeroed key keeps logit 0 in the softmax); "
        "mask-full-kv leaves them out of the softmax."
    )
    return "\n\n".join([table(head, rows), note, *_finer(frame)])


def _horizons(frame: Frame) -> str:
    """dasc Table 1b: median and quartiles of the rank correlations."""
    rows = []
    for case in frame.cases:
        for arm in frame.arms:
            low, high = (frame.value(case, arm, name) for name in ("quartile_1", "quartile_3"))
            middle = frame.value(case, arm, "median")
            if middle is not None:
                n = str(frame.count(case, arm, "median"))
                rows.append([case, arm, number(middle), f"[{number(low)}, {number(high)}]", n])
    return table(["model", "pair", "median", "IQR", "prefix-layer pairs"], rows)


def _trace(frame: Frame) -> str:
    """dasc Table 4 and Figure 4 a-c: latencies, hit rate and capacity of each arm."""
    metrics = [
        ("ttft_mean", 3),
        ("ttft_p50", 3),
        ("ttft_p95", 3),
        ("e2e_mean", 3),
        ("e2e_p50", 3),
        ("e2e_p95", 3),
        ("hit", 4),
        ("capacity", 0),
        ("requests_failed", 0),
    ]
    rows = []
    for case in frame.cases:
        for arm in frame.arms:
            values = [(frame.value(case, arm, m), frame.value(case, arm, f"{m}_sd"), d)
                      for m, d in metrics]  # fmt: skip
            if any(v is not None for v, _, _ in values):
                rows.append([case, arm, *(with_error(v, sd, d) for v, sd, d in values)])
    head = ["server", "arm", *(name for name, _ in metrics)]
    note = (
        "Seconds. Each figure is computed over all requests of a seed, then averaged over seeds "
        "(± sample SD). Capacity counts checkpoint slots in the pools."
    )
    return "\n\n".join([table(head, rows), note])


def _by_metric(frame: Frame) -> str:
    """Suites of the hardware: for each metric a row a case and a column an arm."""
    parts = []
    for metric in dict.fromkeys(r["metric"] for r in frame.records):
        own = [r for r in frame.records if r["metric"] == metric]
        arms = list(dict.fromkeys(r["arm"] for r in own))
        rows = []
        for case in dict.fromkeys(r["case"] for r in own):
            values = [frame.value(case, arm, metric) for arm in arms]
            rows.append([case, *("-" if v is None else f"{v:.4g}" for v in values)])
        parts.append(table([f"{metric}, {own[0]['unit']}", *arms], rows))
    return "\n\n".join(parts)


_SECTIONS = {
    "ruler": _ruler,
    "retention-curve": _ruler,
    "replay-curve": _ruler,
    "intervention": _intervention,
    "horizons": _horizons,
    "trace": _trace,
    "kernels": _by_metric,
    "model": _by_metric,
    "ttft": _by_metric,
    "retention-load": _by_metric,
}
