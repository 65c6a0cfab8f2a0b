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
    peak_lr: float = 2e-3
    final_lr: float = 2e-5
    hold_until: float = 0.45  # fraction of the time at peak_lr; cosine to final_lr after it
    warmup_steps: int = 150
    weight_decay: float = 0.1
    gate_lr: float = 0.1  # A_log and dt_bias learn this much slower, so that horizons stay spread
    ahead: int = 48  # batches in the making: a second or two of an accelerator's work
    log_every: int = 100
    save_seconds: float = 60.0
    trials: int = 100
    trial_bytes: tuple[int, int] = (1000, 2000)
    sample_bytes: int = 700
    eval_seconds: float = 75.0  # kept back from training for the evaluation

    @property
    def lengths(self) -> list[int]:
        """All row lengths, in the order in which phases first need them."""
        return list(dict.fromkeys(length for phase in self.phases for length in phase.lengths))

    def phase_at(self, fraction: float) -> Phase:
        return next((p for p in self.phases if fraction < p.until), self.phases[-1])


PHASES = (
    Phase(
        "256",
        0.18,
        {256: 1.0},
        {
            "fiction": 0.09,
            "stories": 0.14,
            "induction": 0.22,
            "registers": 0.05,
            "recall": 0.45,
            "copying": 0.05,
        },
    ),
    Phase(
        "512",
        0.27,
        {512: 0.8, 256: 0.2},
        {
            "fiction": 0.10,
            "stories": 0.14,
            "induction": 0.16,
            "registers": 0.06,
            "recall": 0.38,
            "chat_recall": 0.07,
            "copying": 0.04,
            "dialogue": 0.05,
        },
    ),
    Phase(
        "1024",
        0.36,
        {1024: 0.8, 512: 0.2},
        {
            "fiction": 0.11,
            "stories": 0.14,
            "induction": 0.10,
            "registers": 0.05,
            "recall": 0.34,
            "chat_recall": 0.12,
            "copying": 0.04,
            "dialogue": 0.10,
        },
    ),
    Phase(
        "2048",
        0.47,
        {2048: 0.75, 1024: 0.25},
        {
            "fiction": 0.11,
            "stories": 0.14,
            "induction": 0.08,
            "registers": 0.05,
            "recall": 0.34,
            "chat_recall": 0.14,
            "copying": 0.04,
            "dialogue": 0.10,
        },
    ),
    Phase(
        "mixed",
        1.0,
        {2048: 0.40, 1024: 0.32, 512: 0.14, 4096: 0.14},
        {
            "fiction": 0.14,
            "stories": 0.25,
            "dialogue": 0.21,
            "recall": 0.12,
            "chat_recall": 0.10,
            "last_write": 0.05,
            "tracking": 0.03,
            "counting": 0.03,
            "registers": 0.03,
            "induction": 0.02,
            "copying": 0.02,
        },
    ),
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
    return Preset(architecture, tokens, PHASES)


def _tiny(architecture: Architecture) -> Preset:
    """A minute on a laptop's processor: shows that everything works, learns little."""
    return Preset(
        architecture,
        tokens_per_batch={128: 2048, 256: 2048},
        phases=(
            Phase("128", 0.6, {128: 1.0}, {"stories": 0.4, "induction": 0.4, "recall": 0.2}),
            Phase("256", 1.0, {256: 1.0}, {"stories": 0.5, "dialogue": 0.3, "recall": 0.2}),
        ),
        warmup_steps=20,
        ahead=6,
        log_every=20,
        save_seconds=20.0,
        trials=8,
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
