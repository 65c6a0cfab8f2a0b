"""From checkpoint tensors to model parameters: rules, and the check that they fit exactly.

A rule fills one parameter from one or more tensors. Every tensor is used exactly once or matches
a named skip, and every parameter is filled exactly once; anything else stops the conversion
before data is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jhybrid.params import ParamSpec

from .checkpoint import CheckpointReader, TensorInfo

FLOAT8 = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Source:
    """A tensor as the published layout has it; `others` are shapes that are read as well."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[np.dtype[Any], ...] = FLOATS
    others: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Transform:
    """Tensors -> parameter, and parameter -> tensors in the order of the rule's sources."""

    forward: Callable[..., np.ndarray]
    inverse: Callable[[np.ndarray], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Rule:
    """`target` is the parameter's path, as `jhybrid.weights.named` spells it."""

    target: str
    sources: tuple[Source, ...]
    transform: Transform


@dataclass(frozen=True)
class Skip:
    """Tensors that the model has no use for; `pattern` is matched at the start of the name."""

    reason: str
    pattern: str


@dataclass(frozen=True)
class Table:
    """Everything a family says of a checkpoint.

    `copies` are (tensor, original) pairs: a tensor that is dropped because its original is used,
    which is right only if both hold the same values.
    """

    rules: tuple[Rule, ...]
    skips: tuple[Skip, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()


def check(table: Table, tensors: Mapping[str, TensorInfo], specs: Mapping[str, ParamSpec]) -> None:
    """ValueError with the whole list of what does not fit, from headers alone."""
    _refuse_float8(tensors)
    sources = [source for rule in table.rules for source in rule.sources]
    used = Counter(source.name for source in sources)
    used.update(name for name, _ in table.copies)
    filled = Counter(rule.target for rule in table.rules)
    patterns = [re.compile(skip.pattern) for skip in table.skips]

    problems = [f"parameter {name} has no rule" for name in specs if name not in filled]
    problems += [f"rule for unknown parameter {name}" for name in filled if name not in specs]
    problems += [f"parameter {name} is filled {n} times" for name, n in filled.items() if n > 1]
    problems += [f"tensor {name} is used {n} times" for name, n in used.items() if n > 1]
    for source in sources:
        problems += _source_problems(source, tensors.get(source.name))
    for name in tensors:
        skipped = any(pattern.match(name) for pattern in patterns)
        if skipped and name in used:
            problems.append(f"tensor {name} is both used and skipped")
        elif not skipped and name not in used:
            shape = list(tensors[name].shape)
            problems.append(f"tensor {name} {shape} is left over: no rule or skip names it")
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"checkpoint does not fit the model ({len(problems)}):\n  {lines}")


def _refuse_float8(tensors: Mapping[str, TensorInfo]) -> None:
    """A checkpoint in FP8 misfits in thousands of tensors; one sentence says it better."""
    found = [name for name, info in tensors.items() if info.dtype in FLOAT8]
    if found:
        info = tensors[found[0]]
        raise ValueError(
            f"{info.file}: tensor {found[0]!r} is {info.dtype} ({len(found)} of {len(tensors)} "
            f"tensors are FP8); expected one of {', '.join(map(str, FLOATS))}: "
            "convert the variant of the model that is not quantized"
        )


def _source_problems(source: Source, info: TensorInfo | None) -> Iterable[str]:
    if info is None:
        yield f"tensor {source.name} {list(source.shape)} is missing"
        return
    where = f"tensor {source.name} in {info.file.name}"
    shapes = (source.shape, *source.others)
    if info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        yield f"{where}: expected shape {expected}, found {list(info.shape)}"
    if info.dtype not in source.dtypes:
        expected = ", ".join(str(dtype) for dtype in source.dtypes)
        yield f"{where}: expected dtype {expected}; found {info.dtype}"


def check_copies(table: Table, reader: CheckpointReader) -> None:
    """ValueError for a dropped tensor that differs from the one used in its place."""
    for name, original in table.copies:
        if not reader.same(name, original):
            raise ValueError(
                f"{reader[name].file}: tensor {name!r} differs from {original!r}, though the "
                "config ties them; set tie_word_embeddings to false in config.json to use both"
            )


def convert(rule: Rule, reader: CheckpointReader, spec: ParamSpec, dtype: Any) -> np.ndarray:
    """One parameter, contiguous; holds its sources and its result, nothing else."""
    value = rule.transform.forward(*(reader.read(source.name) for source in rule.sources))
    if value.shape != spec.shape:
        raise ValueError(f"{rule.target}: expected shape {spec.shape}, its rule made {value.shape}")
    return np.ascontiguousarray(value.astype(spec.dtype_in(dtype), copy=False))


def invert(rule: Rule, value: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that a parameter is published as."""
    tensors = rule.transform.inverse(value)
    out = {}
    for source, tensor in zip(rule.sources, tensors, strict=True):
        if tensor.shape != source.shape:
            raise ValueError(f"{source.name}: expected {source.shape}, got {tensor.shape}")
        out[source.name] = np.ascontiguousarray(tensor)
    return out
