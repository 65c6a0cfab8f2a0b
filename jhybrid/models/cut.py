"""Where a prefill is cut into two programs: the lower layers, and the upper ones.

The KV of a prefix that comes from host memory is most of a hit's wait. Cut, the lower layers run
while that of the upper ones is still on its way. The upper part is small, since nothing hides it;
but its KV must be on its way for about as long as the lower layers run.
"""

from __future__ import annotations

from ..config import ModelConfig

UPPER = 4  # one full-attention layer in so many is in the upper part


def lower_full(count: int) -> int:
    """How many of so many full-attention layers are in the lower part."""
    return count - max(count // UPPER, int(count > 1))


def lower_layers(config: ModelConfig) -> int:
    """How many layers the lower part has: all that come before the first full-attention layer of
    the upper one, or all up to the only one there is, or all where there is none."""
    full = config.full_layers
    if len(full) < 2:
        return full[0] + 1 if full else len(config.layers)
    return full[lower_full(len(full))]
