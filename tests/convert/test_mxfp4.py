"""MXFP4 blocks with values worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jhybrid.convert.families.mxfp4 import unpack


def test_every_code_low_nibble_first() -> None:
    packed = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], np.uint8)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-x for x in values]
    found = unpack(packed, np.array([[127]], np.uint8))
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float64), [values * 2])
    assert np.signbit(found[0, 8].astype(np.float64))  # code 8 is minus zero


@pytest.mark.parametrize(("scale", "factor"), [(0, 2.0**-127), (120, 2.0**-7), (250, 2.0**123)])
def test_scales_are_powers_of_two_exact_in_bfloat16(scale: int, factor: float) -> None:
    packed = np.full((2, 16), 0x73, np.uint8)  # 1.5, then 6
    found = unpack(packed, np.full((2, 1), scale, np.uint8)).astype(np.float64)
    np.testing.assert_array_equal(found, np.tile([1.5 * factor, 6 * factor], (2, 16)))


def test_each_group_of_32_and_each_row_has_its_scale() -> None:
    packed = np.full((2, 32), 0x22, np.uint8)  # ones
    scales = np.array([[127, 128], [126, 129]], np.uint8)
    found = unpack(packed, scales).astype(np.float64)
    np.testing.assert_array_equal(found, np.repeat([[1, 2], [0.5, 4]], 32, axis=1))


def test_scale_byte_255_is_not_a_number() -> None:
    assert np.isnan(unpack(np.zeros((1, 16), np.uint8), np.array([[255]], np.uint8))).all()
