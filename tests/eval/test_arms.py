"""Names of arms, what figures of their outcomes say, and the client of traces by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jhybrid.engine.config import EngineConfig
from jhybrid.eval.arms import (
    MASK_SEEDS,
    engine_flags,
    parse_arm,
    parse_arms,
    random_family,
    with_reference,
)
from jhybrid.eval.outcome import Outcome, _figures
from jhybrid.eval.probes import answer_nll, suffix_kl


def test_names_say_what_an_arm_is():
    arm = parse_arm("dasc-wr/64/int8")
    assert (arm.recovery, arm.intervention) == ("dasc-wr", None)
    assert arm.flags == {"recovery": "dasc-wr", "w_max": 64, "checkpoint_dtype": "int8"}
    assert parse_arm("tail-replay/0.05").replay_ratio == 0.05
    assert parse_arm("anchored").flags == {"recovery": "anchored"}
    anchored = parse_arm("anchored/128/0.2")
    assert (anchored.flags["w_max"], anchored.replay_ratio) == (128, 0.2)
    assert parse_arm("zero-both").intervention == "zero-both"
    assert parse_arm("inverse/16").recovery == "dense"
    assert parse_arm("baseline").recovery == "dense"


@pytest.mark.parametrize(
    "name",
    ["dasc", "dasc-nr", "dasc-nr/2", "dasc-nr/64/int4", "tail-replay", "tail-replay/2", "zero/1",
     "random/64", "random-1", "inverse", "full/x", "anchored/64/int8/0", ""],
)  # fmt: skip
def test_wrong_names_are_refused(name: str):
    with pytest.raises(ValueError, match="^arm: "):
        parse_arm(name)


def test_lists_of_arms():
    names = [arm.name for arm in parse_arms("dasc-nr/16,random/16,dasc-nr/16")]
    assert names == ["dasc-nr/16", *(f"random-{seed}/16" for seed in MASK_SEEDS)]
    assert random_family("random-1234/16") == "random/16" and random_family("dasc-nr/16") is None
    assert [a.name for a in with_reference(parse_arms("zero,dense"))] == ["dense", "zero"]
    assert [a.name for a in with_reference(parse_arms("zero"))] == ["dense", "zero"]
    assert [a.name for a in with_reference(parse_arms("zero,baseline"))] == ["baseline", "zero"]


def test_flags_of_arms():
    common = vars(EngineConfig(max_running=3))
    assert engine_flags(parse_arm("zero"), common) == EngineConfig(max_running=3)
    with pytest.raises(ValueError, match="recovery"):
        engine_flags(parse_arm("off"), {**common, "recovery": "best"})


def _row(token: int, **top: float) -> list[Any]:
    return [token, math.log(top[f"t{token}"]), {k[1:]: math.log(v) for k, v in top.items()}]


def test_kl_of_what_both_name_and_the_rest():
    one = {"suffix": [None, _row(1, t1=0.5, t2=0.25)], "answer": [_row(1, t1=0.5)]}
    other = {"suffix": [None, _row(1, t1=0.25, t2=0.25)], "answer": [_row(1, t1=0.25), None]}
    # 0.5 ln 2 + 0.25 ln 1 + 0.25 ln (0.25 / 0.5)
    assert suffix_kl(one, other) == [pytest.approx(0.25 * math.log(2))]
    assert suffix_kl(one, one) == [0.0]
    assert answer_nll(one) == pytest.approx(math.log(2))
    assert answer_nll({"answer": [None]}) is None
    # a token that only one of them names counts with the rest
    third = {"suffix": [None, _row(1, t1=0.5, t3=0.25)]}
    assert suffix_kl(one, third) == [0.0]


def _outcome(score: float, cached: int, kl: list[float], nll: float) -> Outcome:
    record = {
        "score": score,
        "cached": cached,
        "new": 10,
        "restored": cached,
        "replayed": 3,
        "recovery": "dense",
        "asked": "dense",
    }
    mean = sum(kl) / len(kl) if kl else None
    return Outcome(score, [record, record], nll, mean, dict(enumerate(kl, start=1)))


def test_figures_are_paired_by_problem():
    base = [_outcome(1, 90, [], 0.1), _outcome(0, 0, [], 0.2)]
    own = [_outcome(0.5, 90, [0.2, 0.4], 0.3), _outcome(0.5, 0, [0.1, 0.1], 0.5)]
    found = {metric: (value, n) for metric, value, _, n in _figures(own, base)}
    assert found["score"] == (0.5, 2)  # problems, not generations
    assert found["score_delta"] == (0.0, 2)
    assert found["score_delta_se"][0] == pytest.approx(0.5)
    assert found["hit"] == (180 / 220, 4)
    assert found["loaded"] == (0.5, 4) and found["as_asked"] == (0.5, 4)
    assert found["kl"][0] == pytest.approx(0.2) and found["kl@1"][0] == pytest.approx(0.15)
    assert found["nll_delta"][0] == pytest.approx(0.25)
    alone = {metric for metric, *_ in _figures(base, None)}
    assert "score_delta" not in alone and "nll" in alone
