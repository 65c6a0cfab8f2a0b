"""Arms: what is compared. A name says all of it, so that a result can be read without its flags.

    dense, off, zero                       recoveries without parameters
    dasc-nr/W, dasc-wr/W                   kept units of horizon > W; /int8 stores them as INT8
    tail-replay/R                          the last R of the prefix, 0.05 for 5 %
    anchored, anchored/W[/int8][/R]        from a dense or a compressed checkpoint
    zero-full-kv, zero-linear, zero-both   baseline's cache with a component set to zero
    mask-full-kv, mask-both                likewise, and no softmax has a share for cached keys
    random-SEED/W, inverse/W, full/W, empty/W   a control mask in place of the horizons' (as nr)
    horizon/W                              the horizons' own mask, applied as the controls are

`baseline` is `dense` under the name that dasc's Table 1a has for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from jhybrid.config import require
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.request import RecoveryName

MASK_SEEDS = (1234, 2027, 3407, 4519, 5683)  # of the paper's random masks
EXACT = ("dense", "baseline")  # names of the arm that others are paired with
ZEROED = ("zero-full-kv", "zero-linear", "zero-both")
MASKED = ("mask-full-kv", "mask-both")  # in controlled runs only
_MASK = re.compile(r"random-\d+|inverse|full|empty|horizon")
_COMPRESSED = ("dasc-nr", "dasc-wr", "anchored")


@dataclass(frozen=True)
class Arm:
    """`flags` are the engine's (arms with the same ones share an engine), `recovery` the request's.

    `intervention` names a change of the filled cache before it is reused.
    """

    name: str
    recovery: RecoveryName
    flags: dict[str, Any] = field(default_factory=dict)
    replay_ratio: float | None = None
    intervention: str | None = None


def parse_arm(name: str) -> Arm:
    """Raises ValueError saying what is wrong with a name."""
    kind, *rest = name.split("/")
    if kind in ("dense", "off", "zero", "baseline", *ZEROED, *MASKED):
        require(not rest, "arm", name, f"{kind} alone")
        if kind in (*ZEROED, *MASKED):
            return Arm(name, "dense", intervention=kind)
        return Arm(name, "dense" if kind in ("dense", "baseline") else kind)  # pyright: ignore[reportArgumentType]
    if _MASK.fullmatch(kind):
        require(len(rest) == 1, "arm", name, f"{kind}/W")
        _window(name, rest[0])
        return Arm(name, "dense", intervention=name)
    if kind == "tail-replay":
        require(len(rest) == 1, "arm", name, "tail-replay/R, R such as 0.05")
        ratio = _ratio(name, rest[0])
        return Arm(name, "tail-replay", {"recovery": "tail-replay"}, ratio)
    require(kind in _COMPRESSED, "arm", name, "an arm (see eval/arms.py)")
    flags: dict[str, Any] = {"recovery": kind}
    ratio = None
    if rest and rest[0].isdigit():
        flags["w_max"] = _window(name, rest.pop(0))
    if rest and rest[0] == "int8":
        flags["checkpoint_dtype"] = rest.pop(0)
    if rest and kind == "anchored":
        ratio = _ratio(name, rest.pop(0))
    good = not rest and ("w_max" in flags or (kind == "anchored" and len(flags) == 1))
    require(good, "arm", name, f"{kind}/W or {kind}/W/int8")
    return Arm(name, kind, flags, ratio)  # pyright: ignore[reportArgumentType]


def _window(name: str, text: str) -> int:
    require(text.isdigit() and int(text) >= 4, "arm", name, "a window of at least 4 tokens")
    return int(text)


def _ratio(name: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    require(0 < ratio <= 1, "arm", name, "a ratio above 0 and up to 1")
    return ratio


def parse_arms(text: str) -> list[Arm]:
    """From a comma-separated list; `random/W` stands for the five masks of the paper."""
    names: dict[str, None] = {}
    for name in filter(None, text.split(",")):
        kind, _, rest = name.partition("/")
        if kind == "random":
            names |= {f"random-{seed}/{rest}": None for seed in MASK_SEEDS}
        else:
            names[name] = None
    return [parse_arm(name) for name in names]


def with_reference(arms: list[Arm]) -> list[Arm]:
    """The same with the arm first that the others are paired with: dense, under either name."""
    exact = [arm for arm in arms if arm.name in EXACT] or [parse_arm("dense")]
    return [exact[0], *(arm for arm in arms if arm != exact[0])]


def random_family(name: str) -> str | None:
    """`random/W` for an arm that is one of its masks."""
    match = re.fullmatch(r"random-\d+(/\d+)", name)
    return f"random{match[1]}" if match else None


def engine_flags(arm: Arm, common: dict[str, Any]) -> EngineConfig:
    """Of this arm, on top of the flags that all share."""
    try:
        return EngineConfig(**{**common, **arm.flags})
    except TypeError as error:
        raise ValueError(f"arm {arm.name}: this engine cannot do it ({error})") from None
