"""Where a prefill is cut: into two programs, the lower layers and the upper ones, and before the
layers that run for last tokens alone, which end the upper part.

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


def closing_layers(config: ModelConfig) -> range:
    """The layers that run for last tokens alone (see `finish`): the last one, or none if it is
    linear, since a state needs all of every token."""
    count = len(config.layers)
    return range(count - int(count - 1 in config.full_layers), count)


def lower_layers(config: ModelConfig) -> int:
    """How many layers the lower part has: all that come before the first full-attention layer of
    the upper one, or all up to the only one there is, or all where there is none; no closing one.
    """
    full = config.full_layers
    if len(full) < 2:
        up_to = full[0] + 1 if full else len(config.layers)
        return min(up_to, closing_layers(config).start)
    return full[lower_full(len(full))]
