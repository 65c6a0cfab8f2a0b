"""Groups: what Tail-Replay rebuilds one independently of the other (its section 3).

A group is a full-attention layer (the embedding, for the first one) and the linear layers after it
up to the next. Its input, the residual stream entering its first linear layer, is all that those
layers see of the model below them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig, require


@dataclass(frozen=True)
class Group:
    """The linear layers of a group, by their number in the model and among the linear layers.

    `stored` counts the groups whose input is kept; None where it is the embedding of the tokens.
    """

    layers: tuple[int, ...]
    linear: tuple[int, ...]
    stored: int | None


def groups(config: ModelConfig) -> tuple[Group, ...]:
    """The groups that have linear layers, in order. A full layer without any stores nothing.

    With attention residuals a layer reads streams of all blocks before it, so that no group has an
    input of its own: ValueError.
    """
    block = config.residual_block
    require(block is None, "group inputs", f"residual_block {block}", "no attention residuals")
    found: list[Group] = []
    linear = 0
    for number, layer in enumerate(config.layers):
        if layer.mixer != "linear":
            continue
        if number and config.layers[number - 1].mixer == "linear":
            last = found.pop()
            found.append(Group((*last.layers, number), (*last.linear, linear), last.stored))
        else:
            kept = sum(group.stored is not None for group in found)
            found.append(Group((number,), (linear,), kept if number else None))
        linear += 1
    return tuple(found)


def stored_inputs(config: ModelConfig) -> int:
    """How many group inputs of a token are kept."""
    return sum(group.stored is not None for group in groups(config))
