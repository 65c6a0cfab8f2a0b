"""What the prefix tree is made of: nodes, checkpoints, and the answers it gives.

A node is an edge of tokens with an absolute range. Page index i holds positions
[i * page_size, (i + 1) * page_size); a node names a page for every index its range touches, so
at a border inside a page both nodes name one:

    positions    0 . . . 16 . . . 32          page_size 16
    A [0, 20)    |--p0--|-p1-.                split: A and B hold the same p1
    B [20, 30)          '-p1-|                written by another request: B has its own p1', whose
                                              first part is a copy of p1's

So going down, the deepest node's page is the right one for every index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from flax import struct
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
PageIds = NDArray[np.int32]
Representation = Literal["dense", "demoting", "compressed", "host", "absent"]
Refusal = Literal["duplicate", "depth"]


@struct.dataclass
class Checkpoint:
    """A recurrent state that has consumed exactly `depth` tokens.

    `slot` belongs to the pool of the representation: the native one for `dense`, and for `demoting`
    (on its way to a compressed slot) until that is committed. An `absent` one was evicted and stays
    as a note, so that a short hit can say why; its slot is -1. `exact`: no approximation went into
    it before it was stored. `passing`: it was left on the way of a long prefill, no prefix is known
    to end or part there, and no hit has used it.
    """

    slot: int
    depth: int
    representation: Representation = struct.field(pytree_node=False, default="dense")
    exact: bool = struct.field(pytree_node=False, default=True)
    passing: bool = struct.field(pytree_node=False, default=False)


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """Tokens [start, end) below `parent`, the pages that hold their KV, a checkpoint at `end`."""

    serial: int  # orders nodes of equal age
    start: int
    tokens: Tokens
    pages: PageIds  # for page indices start // page_size .. (end - 1) // page_size
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)  # by their first token
    locks: int = 0  # users of the KV of [0, end)
    used: int = 0  # when the KV was last used, on the tree's clock
    checkpoint: Checkpoint | None = None
    checkpoint_locks: int = 0  # users of the checkpoint
    exact: bool = True  # no approximate state went into this KV or any above it
    attached: bool = True

    def __repr__(self) -> str:  # not the whole tree above and below
        state = self.checkpoint.representation if self.checkpoint else "no"
        return f"Node([{self.start}, {self.end}), {state} checkpoint, {self.locks} locks)"

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def has_state(self) -> bool:
        """Whether there is a checkpoint, in whatever representation."""
        return self.checkpoint is not None and self.checkpoint.representation != "absent"

    @property
    def pinned(self) -> bool:
        """Whether its checkpoint must stay as it is: somebody reads it, or it is being packed."""
        demoting = self.checkpoint is not None and self.checkpoint.representation == "demoting"
        return self.checkpoint_locks > 0 or demoting

    @property
    def evictable(self) -> bool:
        """Whether it may leave the tree: a leaf of which nobody uses KV or checkpoint."""
        return (
            self.attached
            and self.parent is not None
            and not self.children
            and self.locks == 0
            and not self.pinned
        )


@dataclass(frozen=True, eq=False)
class Match:
    """The longest cached prefix of some tokens. True until the tree changes; hold it by a Lock.

    `pages` covers [0, length). `branch_depth` is `length` where the tree goes on from there but
    has no checkpoint. `exact`: KV and state have no approximation in them. `reason` says in a word
    why `restored` is less than `length`.
    """

    length: int
    pages: PageIds
    node: Node  # the deepest node touched; it may end after `length`
    checkpoint_node: Node | None
    branch_depth: int | None
    exact: bool
    reason: str | None

    @property
    def restored(self) -> int:
        """Depth of the deepest checkpoint on the path, 0 for none."""
        return self.checkpoint_node.end if self.checkpoint_node else 0


@dataclass(eq=False)
class Lock:
    """What one user pins: the KV of [0, node.end) and the checkpoint of `checkpoint_node`."""

    node: Node
    checkpoint_node: Node | None


@dataclass(frozen=True, eq=False)
class Insertion:
    """`node` ends where the tokens end; [0, duplicate) was there, the rest of them is new.

    `refused` tells why the checkpoint was not taken, and the caller still owns its slot: the node
    has a `duplicate`, or the `depth` is not the node's. None: taken, or there was none.
    """

    node: Node
    duplicate: int
    refused: Refusal | None


def common_length(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
