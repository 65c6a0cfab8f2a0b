"""A tree comes out of its array as it went in."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jhybrid.packed import pack, unpack


def test_a_tree_of_every_type_and_shape_comes_back() -> None:
    tree = {
        "scalar": np.int32(-7),
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "none": None,
        "floats": (np.array([1.5, -np.inf, np.nan], np.float32), np.float32(0.1)),
        "seed": np.array([2**32 - 1, 1], np.uint32),
        "empty": np.zeros(0, np.int32),
    }
    packed = pack(tree)
    assert packed.values.shape == (13,)
    assert packed.shapes == {
        **{"scalar": (), "table": (2, 3), "none": None, "floats": ((3,), ())},
        **{"seed": (2,), "empty": (0,)},
    }
    back = jax.jit(unpack)(packed)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for leaf, expected in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(leaf, expected)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        pack(np.zeros(2))
