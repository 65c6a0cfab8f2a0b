"""What a program takes from the host, as one array: a transfer each costs more than their bytes."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Int32


@struct.dataclass
class Packed:
    """The leaves of a pytree, end to end. `tree` and `leaves`, their shapes and types, are static:
    a program is compiled for them."""

    values: Int32[Array, " N"]
    tree: Any = struct.field(pytree_node=False)
    leaves: tuple[tuple[tuple[int, ...], str], ...] = struct.field(pytree_node=False)

    @property
    def shapes(self) -> Any:
        """The pytree with the shape of each leaf in its place."""
        return jax.tree.unflatten(self.tree, [shape for shape, _ in self.leaves])


def pack(tree: Any) -> Packed:
    """A pytree of numpy arrays of four-byte types. Raises ValueError for another type."""
    found, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf) for leaf in found]
    for array in arrays:
        if array.dtype.itemsize != 4:
            raise ValueError(f"leaves must be of four-byte types, got {array.dtype}")
    values: Any = np.concatenate([array.ravel().view(np.int32) for array in arrays])
    return Packed(values, structure, tuple((array.shape, array.dtype.str) for array in arrays))


def unpack(packed: Packed) -> Any:
    """The pytree, inside a program."""
    leaves, at = [], 0
    for shape, dtype in packed.leaves:
        size = math.prod(shape)
        part = packed.values[at : at + size].reshape(shape)
        leaves.append(jax.lax.bitcast_convert_type(part, np.dtype(dtype)))
        at += size
    return jax.tree.unflatten(packed.tree, leaves)
