"""What is trained and when: model sizes, and phases of a length and task curriculum.

Retrieval appears as a phase change that many small steps on short, dense rows bring about within a
minute; once it is there, it carries over to longer rows, and the rest of the time goes to prose,
conversation and the other skills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .architectures import Architecture, GatedDeltaNet, KimiLinear

Shares = Mapping[str, float]


@dataclass(frozen=True)
class Phase:
    """Runs until `until`, a fraction of the training time. Shares are of batches and of rows."""

    name: str
    until: float
    lengths: Mapping[int, float]
    mix: Shares


@dataclass(frozen=True)
class Preset:
    architecture: Architecture
    tokens_per_batch: Mapping[int, int]
    phases: tuple[Phase, ...]
    refined: Phase  # of a training that goes on from another's weights
    peak_lr: float = 2e-3
    final_lr: float = 2e-5
    hold_until: float = 0.45  # fraction of the time at peak_lr; cosine to final_lr after it
    warmup_steps: int = 150
    weight_decay: float = 0.1
    gate_lr: float = 0.1  # A_log and dt_bias learn this much slower, so that horizons stay spread
    ahead: int = 48  # batches in the making: a second or two of an accelerator's work
    log_every: int = 100
    save_seconds: float = 60.0
    trials: int = 50
    trial_bytes: tuple[int, int] = (1000, 2000)
    sample_bytes: int = 700
    scored: int = 40  # problems of each of the evaluation's tasks and of each length
    scored_lengths: tuple[int, ...] = (1024, 2048, 4096)
    eval_seconds: float = 65.0  # kept back from training for the evaluation

    @property
    def lengths(self) -> list[int]:
        """All row lengths, in the order in which phases first need them."""
        return list(dict.fromkeys(length for phase in self.phases for length in phase.lengths))

    def continued(self) -> Preset:
        """To go on with a trained model: one phase more, from half the peak rate."""
        return replace(
            self, phases=(self.refined,), peak_lr=self.peak_lr / 2, hold_until=self.hold_until / 2
        )

    def phase_at(self, fraction: float) -> Phase:
        return next((p for p in self.phases if fraction < p.until), self.phases[-1])


MIX = {
    "fiction": 0.05,
    "stories": 0.10,
    "dialogue": 0.09,
    "induction": 0.03,
    "registers": 0.04,
    "recall": 0.06,
    "chat_recall": 0.07,
    "copying": 0.01,
    "needles": 0.16,
    "writes": 0.13,
    "variables": 0.06,
    "common_words": 0.12,
    "frequent_words": 0.08,
}
PHASES = (
    # Alone a state learns from 2 MB to hold what came last; beside the rest it does not in 150,
    # since attention or a guess take what is left of the loss first.
    Phase("order", 0.06, {256: 1.0}, {"registers": 0.8, "writes": 0.2}),
    Phase(
        "256",
        0.16,
        {256: 1.0},
        {
            "fiction": 0.05,
            "stories": 0.08,
            "induction": 0.12,
            "registers": 0.15,
            "recall": 0.13,
            "needles": 0.10,
            "writes": 0.20,
            "variables": 0.06,
            "common_words": 0.05,
            "frequent_words": 0.06,
        },
    ),
    Phase(
        "512",
        0.27,
        {512: 0.8, 256: 0.2},
        {
            "fiction": 0.05,
            "stories": 0.08,
            "induction": 0.08,
            "registers": 0.10,
            "recall": 0.08,
            "chat_recall": 0.05,
            "copying": 0.02,
            "dialogue": 0.03,
            "needles": 0.12,
            "writes": 0.17,
            "variables": 0.08,
            "common_words": 0.07,
            "frequent_words": 0.07,
        },
    ),
    Phase("1024", 0.42, {1024: 0.8, 512: 0.2}, MIX),
    Phase("2048", 0.62, {2048: 0.7, 1024: 0.3}, MIX),
    Phase("mixed", 1.0, {4096: 0.40, 2048: 0.35, 1024: 0.20, 512: 0.05}, MIX),
)

# What comes last in training: counting over a whole context, where recall has long been perfect.
REFINED = Phase(
    "refined",
    1.0,
    {4096: 0.55, 2048: 0.25, 1024: 0.15, 512: 0.05},
    {
        **MIX,
        "needles": 0.12,
        "variables": 0.04,
        "induction": 0.01,
        "registers": 0.03,
        "frequent_words": 0.06,
        "common_words": 0.23,
    },
)

GDN = GatedDeltaNet(
    pattern="LLLFLLLF",
    hidden=256,
    mlp=512,
    heads=4,
    linear_heads=4,
    key_dim=64,
    kv_heads=2,
    head_dim=64,
    value_heads=8,
    value_dim=32,
)
KDA = KimiLinear(
    pattern="LLLFLLLF",
    hidden=256,
    mlp=512,
    heads=4,
    linear_heads=4,
    key_dim=64,
    latent_dim=128,
    nope_dim=48,
    shared_dim=16,
    value_dim=64,
)
TINY_GDN = replace(
    GDN, pattern="LLLF", hidden=64, mlp=128, heads=2, linear_heads=2, key_dim=16, kv_heads=1,
    head_dim=32, value_heads=4, value_dim=16,
)  # fmt: skip
TINY_KDA = replace(
    KDA, pattern="LLLF", hidden=64, mlp=128, heads=2, linear_heads=2, key_dim=16, latent_dim=32,
    nope_dim=16, shared_dim=16, value_dim=32,
)  # fmt: skip


def _full(architecture: Architecture) -> Preset:
    tokens = {256: 16384, 512: 16384, 1024: 16384, 2048: 32768, 4096: 32768}
    return Preset(architecture, tokens, PHASES, REFINED)


def _tiny(architecture: Architecture) -> Preset:
    """A minute on a laptop's processor: shows that everything works, learns little."""
    mix = {"stories": 0.4, "dialogue": 0.2, "recall": 0.2, "writes": 0.2}
    return Preset(
        architecture,
        tokens_per_batch={128: 2048, 256: 2048},
        phases=(
            Phase("128", 0.6, {128: 1.0}, {"stories": 0.4, "induction": 0.4, "recall": 0.2}),
            Phase("256", 1.0, {256: 1.0}, mix),
        ),
        refined=Phase("refined", 1.0, {256: 1.0}, mix),
        warmup_steps=20,
        ahead=6,
        log_every=20,
        save_seconds=20.0,
        trials=8,
        scored=2,
        scored_lengths=(1024,),
        trial_bytes=(300, 400),
        sample_bytes=60,
        eval_seconds=40.0,
    )


PRESETS = {
    "gdn": _full(GDN),
    "kda": _full(KDA),
    "tiny-gdn": _tiny(TINY_GDN),
    "tiny-kda": _tiny(TINY_KDA),
}
