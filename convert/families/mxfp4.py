"""MXFP4: 4-bit floats (E2M1) in groups of 32 inputs that share a power of two (E8M0).

Byte j of a packed row holds element 2j in its low nibble and 2j + 1 in its high one. The values
are exact in bfloat16, the dtype they are unpacked to.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _values() -> np.ndarray:
    """[256 scale bytes, 16 nibbles]: every value there is. Scale byte 255 means NaN."""
    signed = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float64)
    scales = np.ldexp(1.0, np.arange(256) - 127)
    scales[255] = np.nan
    with np.errstate(over="ignore"):
        return (signed * scales[:, None]).astype(ml_dtypes.bfloat16)


VALUES = _values()


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 [out, in/2] and uint8 [out, in/32] -> bfloat16 [out, in]."""
    rows, width = packed.shape[0], 2 * packed.shape[1]
    nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(rows, -1, GROUP)
    return VALUES[scale[:, :, None], nibbles].reshape(rows, width)
