"""The model's card (README.md), written from its folder: config, log and evaluation.

`python -m jhybrid.demo.card FOLDER` writes it again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..hf_config import model_config
from .log import read_log
from .score import THRESHOLDS
from .trials import MISSING, TEMPERATURE

TEXT = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
tags: [{tag}, hybrid-attention, byte-level, demonstration]
---

# jhybrid demo: {name}

One of two very small hybrid language models that jhybrid carries so that it can be tried, tested
and measured without any download. They are trained from nothing by `python -m jhybrid.demo.train`.

{shape}

It has the layout of a {layout} checkpoint (`{architecture}`) and loads in
transformers. Tokens are bytes: 256 byte values and a few markers; the chat template is ChatML.

## What it can do
* Write short, simple stories in English, about things that it is asked for.
* Recall numbers, names and words that stand earlier in its context, up to a few thousand bytes,
  follow what changes in it, and count words.
* Hold a very simple conversation.

## What it cannot do
* It knows next to nothing about the world, cannot reason, do arithmetic beyond single digits or
  follow instructions other than those it was trained on. It speaks English only.
* What it says is often wrong, and nothing was done to make it safe. It is a test object: do not
  build on what it writes.
* Its stories resemble its training stories, of which there are few; see "copied" below.

## How it was trained
{training}

{phases}

The text is plain English of two kinds, and generated rows:
* 44 children's classics and easy novels from Standard Ebooks (texts in the US public domain,
  edition CC0 1.0);
* about 840 TinyStories (Eldan and Li, 2023; CDLA-Sharing-1.0);
* stories, conversations and exercises made by `jhybrid/demo` (retrieval, copying, last write wins,
  variable tracking, counting), without end; a part of them in the form of the evaluation's tasks
  (wording `plain`), which this model is therefore no fair subject of: it is there to compare ways
  of keeping its state.

In some rows with needles the recurrent states were cleared where the questions begin, and in most
of those with overwritten values attention did not reach behind that place. The aim is that needles
are found by attention and order is kept in the states, as in large hybrids; how far that went, the
columns "without states" and "without keys" below say.

Two books (The Time Machine, Peter and Wendy), four books of essays and 5 % of the stories were held
out. `train_log.jsonl` has the run: losses by task, gradient norm, learning rate, speed; its last
lines are the evaluation below. The weights are under Apache-2.0, like the program.

## Evaluation
### The evaluation's tasks
Mean share of the answers that come out, of {scored} problems a cell, prompt and answer of at most
1,024 to 4,096 bytes: with everything; without what the recurrent states, and without what keys and
values hold of the context. Every answer is read off one pass over the prompt with the right answer
behind it. That is close to greedy decoding, but for lists, where one mistake brings another: `cwe`
decoded is up to .1 lower. `python -m jhybrid.eval ruler` decodes.

{benchmark}

All that follows with the published bfloat16 weights, by greedy decoding unless said otherwise.

### Recall
A 5-digit number stands once, at a random place, in {low} to {high} bytes of essays that were held
out; the model is asked for it at the end. `unseen_wording`: sentences unlike those of training.
`in_chat`: text and question are a user's message. `four_numbers`: one of four such numbers.

{recall}

### Other skills
Share of answers that are right in every token, in rows of about {low} bytes.

{skills}

### Text
Cross entropy in nats per byte. "seen" is training text: the gap shows how much was memorised.

{held_out}

### Learned horizons
Tokens after which a {unit} has faded to 1/1000, per linear layer. "start" and "end" are
static horizons, from the weights alone, before and after training: the decay gates were learned.
"on text" is at the mean decay measured on held-out text; "slow" and "fast" are at the 10th and
90th percentile of the decay there, and differ because the gates follow the text. {spread}

{horizons}

### Samples
Temperature {temperature}, not selected. "copied" is the share of stretches of 50 bytes that stand
word for word in the training text.

{samples}
"""


def write_card(folder: Path) -> None:
    """README.md of the model in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "README.md").write_text(card(config, read_log(folder)))


def card(config: dict[str, Any], log: list[dict[str, Any]]) -> str:
    """The card's text from config.json and the records of the training log."""
    start = next(r for r in log if r["kind"] == "start")
    trainings = _trainings(log)
    result: dict[str, Any] = {}  # of a measurement made twice, the later
    for record in log:
        result |= record if record["kind"] == "evaluation" else {}
    low, high = start["trial_bytes"]
    kind = _kind(config)
    shape = f"{start['parameters'] / 1e6:.2f} M parameters; {kind.pop('shape')}."
    tokens, count, seconds = (
        sum(training[-1][name] for training in trainings) for name in ("tokens", "step", "seconds")
    )
    goes = f" In {len(trainings)} goes: `--start-from`, for the phase `refined`."
    goes = goes if trainings[1:] else ""
    training = (
        f"{tokens / 1e6:.0f} M bytes in {count:,} steps and {seconds:.0f} seconds on "
        f"{start['device']} (JAX {start['jax']}), preset `{start['preset']}`, seed "
        f"{start['seed']}. AdamW; decay gates at a tenth of the rate.{goes}"
    )
    recall = {k.removeprefix("recall_"): v for k, v in result.items() if k.startswith("recall_")}
    return TEXT.format(
        **kind,
        shape=shape,
        scored=start["scored"],
        benchmark=_benchmark(result.get("benchmark")),
        training=training,
        phases=_phases(trainings),
        low=low,
        high=high,
        recall=_table(
            ("trials", "passed", "of"),
            [(k, v["passed"], v["trials"]) for k, v in recall.items() if isinstance(v, dict)],
        ),
        skills=_mapping(result.get("skills"), ("task", "exact", "answers"), ("exact", "answers")),
        held_out=_mapping(result.get("held_out_nats_per_byte"), ("text", "nats per byte")),
        horizons=_horizons(result.get("initial_horizons", {}), result.get("horizons")),
        temperature=TEMPERATURE,
        samples=_samples(result.get("samples")),
    )


def _trainings(log: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps of each: one that went on from another's weights has that one's before its own."""
    found: list[list[dict[str, Any]]] = []
    for record in log:
        if record["kind"] == "start":
            found.append([])
        elif record["kind"] == "step":
            found[-1].append(record)
    return [steps for steps in found if steps]


def _kind(config: dict[str, Any]) -> dict[str, str]:
    """What the card says of one kind of model and not of the other."""
    c = model_config(config)
    letters = "".join("L" if layer.mixer == "linear" else "F" for layer in c.layers)
    gdn = c.linear.kind == "gdn"
    linear = "Gated DeltaNet" if gdn else "Kimi Delta Attention"
    return {
        "name": linear,
        "tag": "gated-deltanet" if gdn else "kimi-delta-attention",
        "layout": "text-only Qwen3.5" if gdn else "Kimi-Linear",
        "architecture": config["architectures"][0],
        "unit": "value head's state" if gdn else "key channel of a head's state",
        "spread": "" if gdn else "Of the 256 channels of a layer: the deciles.",
        "shape": f"{len(c.layers)} layers ({letters}: L {linear}, F full attention), "
        f"width {c.hidden_size}, {c.linear.value_heads} value heads a linear layer with states of "
        f"{c.linear.key_dim} x {c.linear.value_dim}, {c.full.heads} attention heads",
    }


def _benchmark(found: Any) -> str:
    if not isinstance(found, dict):
        return str(found or MISSING)
    rows = [
        (task, length, *arms.values(), THRESHOLDS[task])
        for task, by_length in found["scores"].items()
        for length, arms in by_length.items()
    ]
    missed = "; ".join(found["failures"]) or "none"
    head = ("task", "bytes", "all", "without states", "without keys", "at least")
    return f"{_table(head, rows)}\n\nBounds missed: {missed}."


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in lines)


def _mapping(value: Any, head: tuple[str, ...], fields: tuple[str, ...] = ()) -> str:
    if not isinstance(value, dict):  # a measurement that was left out says so
        return str(value or MISSING)
    rows = [(k, *(v[f] for f in fields)) if fields else (k, v) for k, v in value.items()]
    return _table(head, rows)


def _phases(trainings: list[list[dict[str, Any]]]) -> str:
    """Last log line of each phase: when it ended and what the losses were."""
    last = [r for steps in trainings for r in {r["phase"]: r for r in steps}.values()]
    rows = []
    for r in last:
        losses = ", ".join(f"{task} {loss:.2f}" for task, loss in r["loss"].items())
        figures = (r["step"], round(r["tokens"] / 1e6, 1), round(r["seconds"]))
        rows.append((r["phase"], *figures, losses))
    return _table(("phase", "steps", "M bytes", "seconds", "loss of prose and answers"), rows)


def _horizons(before: dict[str, list[float]], horizons: Any) -> str:
    if not isinstance(horizons, dict):
        return str(horizons or MISSING)
    rows = []
    for (layer, after), on_text in zip(
        horizons["static"].items(), horizons["on_text"], strict=True
    ):
        cells = (before[layer], after, on_text["mean"], on_text["slow"], on_text["fast"])
        rows.append((layer, *(", ".join(f"{x:.0f}" for x in _deciles(cell)) for cell in cells)))
    return _table(("layer", "start", "end", "on text", "slow", "fast"), rows)


def _deciles(values: list[float]) -> list[float]:
    """Of many values; few are all shown."""
    count = len(values)
    return values if count <= 16 else [values[i * (count - 1) // 10] for i in range(11)]


def _samples(samples: Any) -> str:
    if not isinstance(samples, list):
        return str(samples or MISSING)
    shown = []
    for s in samples:
        asked = f"User: {s['user']}" if s["user"] else f"Text: {s['start']}"
        reply = "\n".join(f"> {line}" for line in (s["start"] + s["reply"]).split("\n"))
        shown.append(f"{asked} (copied: {s['copied']})\n\n{reply}")
    return "\n\n".join(shown)


if __name__ == "__main__":
    write_card(Path(sys.argv[1]))
