"""What is trained and when: model sizes, and phases of a length and task curriculum.

Retrieval appears as a phase change that many small steps on short, dense rows bring about within a
minute; once it is there, it carries over to longer rows, and the rest of the time goes to prose,
conversation and the other skills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..hf_config import model_config
from .tokenizer import END_OF_TEXT, IM_END, MAX_CONTEXT, VOCAB_SIZE

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
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    mlp: int
    tokens_per_batch: Mapping[int, int]
    phases: tuple[Phase, ...]
    pattern: str = "LLLF"  # L linear, F full attention; repeated
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

    def hf_config(self) -> dict[str, Any]:
        """The published form: config.json of a text-only Qwen3.5 checkpoint."""
        kinds = {"L": "linear_attention", "F": "full_attention"}
        pairs = self.head_dim // 8  # rotated pairs: a quarter of the head, two dims each
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "layer_types": [kinds[self.pattern[i % len(self.pattern)]] for i in range(self.layers)],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": 4,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            },
            "max_position_embeddings": MAX_CONTEXT,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": IM_END,
            "pad_token_id": END_OF_TEXT,
        }

    def model_config(self) -> ModelConfig:
        return model_config(self.hf_config())


DEMO_PHASES = (
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

PRESETS = {
    "demo": Preset(
        hidden=256,
        layers=8,
        heads=4,
        kv_heads=2,
        head_dim=64,
        key_heads=4,
        value_heads=8,
        key_dim=64,
        value_dim=32,
        mlp=512,
        tokens_per_batch={256: 16384, 512: 16384, 1024: 16384, 2048: 32768, 4096: 32768},
        phases=DEMO_PHASES,
    ),
    # A minute on a laptop's processor: shows that everything works, learns little.
    "tiny": Preset(
        hidden=64,
        layers=4,
        heads=2,
        kv_heads=1,
        head_dim=32,
        key_heads=2,
        value_heads=4,
        key_dim=16,
        value_dim=16,
        mlp=128,
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
    ),
}
